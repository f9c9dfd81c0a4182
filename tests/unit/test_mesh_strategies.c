/* Strategies on a mesh of tensor x data ranks: every element of the model counts once, whoever holds it. Programs
 * make their gradients themselves, element by element of the whole model; a loop in double that knows nothing of
 * ranks says what the values become. */
#include "test.h"

#include "dtrain.h"
#include "ranks.h"
#include "null_step.h"
#include "seeds.h"

enum { MOST = 12, LONGEST = 640, STEPS = 3, MICROS = 3, UNITS = 4 };

/* A parameter of the whole model, and what the oracle knows of it. */
typedef struct whole_param {
    char name[16];
    int64_t shape[2], count;
    uint32_t unit, flags, axis, components;
    int64_t parts, widths[3];
    int alias; /* index of its target, or -1 */
    double value[LONGEST], momentum[LONGEST], grad[LONGEST];
    bool stepped; /* it has had an update */
} whole_param;

typedef struct program {
    uint64_t seed;
    int tensor, data;
    bool sequence_parallel, joins, lacks, host_grads, topk, slow;
    int micros;
    float max_norm;
    dtrain_strategy_desc desc;
    whole_param params[MOST];
    int count;
    dtrain_world *world;
    dtrain_mesh *mesh;
    dtrain_mesh_info at;
    int64_t here[LONGEST]; /* scratch */
    float read[LONGEST], own[MOST][LONGEST];
} program;

static uint64_t drawn(uint64_t seed, uint64_t a, uint64_t b, uint64_t c, uint64_t d)
{
    return ranks_mix(ranks_mix(ranks_mix(ranks_mix(seed ^ a) ^ b) ^ c) ^ d);
}

/* The sample's gradient of an element, a multiple of 1/64 so that sums in fp32 are exact; of tensor rank `part` of
 * `parts`, what its rows add to it. */
static double sample_grad(const program *c, uint64_t sample, int i, int64_t element, int part)
{
    const uint64_t x = drawn(c->seed, sample + 1, (uint64_t)i, (uint64_t)element, (uint64_t)part);
    return ((double)(x % 257) - 128) / 64;
}
static double partial_grad(const program *c, uint64_t sample, int i, int64_t e, int part)
{
    if (!c->sequence_parallel) return sample_grad(c, sample, i, e, 0);
    double rest = sample_grad(c, sample, i, e, 0);
    if (part) return sample_grad(c, sample, i, e, part);
    for (int p = 1; p < c->tensor; p++) rest -= sample_grad(c, sample, i, e, p);
    return rest;
}

/* ---- Which elements are here --------------------------------------------------------------------- */

/* The tensor rank of an element: its place along the axis, in its component, in the part there. */
static int owner_of(const program *c, const whole_param *p, int64_t element)
{
    const int64_t columns = p->shape[1] ? p->shape[1] : 1;
    int64_t at = p->axis == DTRAIN_CUT_ROWS ? element / columns : element % columns;
    const int64_t length = p->axis == DTRAIN_CUT_ROWS ? p->shape[0] : columns;
    const int64_t components = p->components ? p->components : 1;
    for (int k = 0; k < components; k++) {
        const int64_t width = p->widths[0] ? p->widths[k] : length / components;
        const int64_t parts = p->parts ? p->parts : width;
        if (at >= width) {
            at -= width;
            continue;
        }
        for (int r = 0; r < c->tensor; r++)
            if (at / (width / parts) < parts * (r + 1) / c->tensor) return r;
    }
    return -1;
}

/* Element k of the array here is the k-th of the whole that this rank owns. */
static int64_t elements_here(const program *c, const whole_param *p, int64_t *here)
{
    int64_t count = 0;
    for (int64_t e = 0; e < p->count; e++)
        if (!p->axis || c->tensor == 1 || owner_of(c, p, e) == c->at.tensor_rank) here[count++] = e;
    return count;
}

/* ---- The model ------------------------------------------------------------------------------------ */

static whole_param *add_param(program *c, int64_t rows, int64_t columns, uint32_t axis)
{
    whole_param *p = &c->params[c->count];
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "p%d", c->count++);
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->count = rows * (columns ? columns : 1);
    p->axis = axis;
    p->alias = -1;
    return p;
}

/* Four units, so that buffers which take turns are used again; packed components, grouped heads, uneven lengths, a tied
 * weight, a frozen one. */
static void make_model(program *c)
{
    c->count = 0;
    add_param(c, 13, 7, DTRAIN_CUT_ROWS); /* 13 over 2, 3, 4 ranks: uneven */
    add_param(c, 11, 0, DTRAIN_CUT_NONE);
    whole_param *p = add_param(c, 48, 6, DTRAIN_CUT_ROWS); /* q|k|v of 4 heads of 4 */
    p->components = 3;
    p->parts = 4;
    p = add_param(c, 40, 3, DTRAIN_CUT_ROWS); /* grouped queries: 4 heads of keys */
    p->unit = 1;
    p->components = 3;
    p->parts = 4;
    p->widths[0] = 24;
    p->widths[1] = p->widths[2] = 8;
    p = add_param(c, 5, 17, DTRAIN_CUT_COLUMNS);
    p->unit = 1;
    p = add_param(c, 21, 0, DTRAIN_CUT_NONE);
    p->unit = 1;
    p = add_param(c, 9, 0, DTRAIN_CUT_NONE);
    p->unit = 2;
    p = add_param(c, 6, 21, DTRAIN_CUT_COLUMNS);
    p->unit = 2;
    p = add_param(c, 3, 4, DTRAIN_CUT_NONE);
    p->unit = 2;
    p->flags = c->seed % 2 ? DTRAIN_PARAM_FROZEN : 0;
    p = add_param(c, 13, 7, DTRAIN_CUT_ROWS);
    p->unit = 3;
    p->alias = 0;
    p = add_param(c, 8, 0, DTRAIN_CUT_NONE);
    p->unit = 3;
    p = add_param(c, 8, 5, DTRAIN_CUT_ROWS);
    p->unit = 3;
}

static void registered(const program *c, dtrain_param *params)
{
    memset(params, 0, (size_t)c->count * sizeof *params);
    for (int i = 0; i < c->count; i++) {
        const whole_param *p = &c->params[i];
        params[i].name = p->name;
        memcpy(params[i].shape, p->shape, sizeof p->shape);
        params[i].unit = p->unit;
        params[i].flags = p->flags;
        params[i].init = i % 3 ? DTRAIN_INIT_NORMAL : DTRAIN_INIT_UNIFORM;
        params[i].init_scale = 1;
        params[i].cut.axis = p->axis;
        params[i].cut.components = p->components;
        params[i].cut.parts = p->parts;
        memcpy(params[i].cut.widths, p->widths, sizeof p->widths);
        if (p->alias >= 0) params[i].alias_of = &params[p->alias];
    }
}

/* ---- A step, of the ranks and of the oracle ------------------------------------------------------- */

static uint64_t sample_of(const program *c, int step, int micro, int data_rank)
{
    return (uint64_t)((step * MICROS + micro) * c->data + data_rank);
}
static bool has_samples(const program *c, int step, int micro, int data_rank)
{
    return !c->joins ||
           drawn(c->seed, 71, (uint64_t)step, (uint64_t)micro, (uint64_t)data_rank) % 4;
}
static bool has_gradient(const program *c, uint64_t sample, int i)
{
    return !c->lacks || drawn(c->seed, 72, sample, (uint64_t)i, 0) % 4;
}
static float weight_of(const program *c, uint64_t sample)
{
    return c->seed % 3 ? 1.0f : (float)(1 + drawn(c->seed, 73, sample, 0, 0) % 4) / 4;
}

static dtrain_result take_backward(program *c, dtrain_strategy *s, dtrain_param *params,
                                   uint64_t sample)
{
    int64_t *here = c->here;
    for (uint32_t u = 0; u < UNITS; u++) {
        TRY(dtrain_strategy_gather(s, u, DTRAIN_PASS_FORWARD));
        for (int i = 0; i < c->count;
             i++) { /* values are the oracle's wherever a forward reads them */
            const whole_param *w = &c->params[i],
                              *storage = w->alias < 0 ? w : &c->params[w->alias];
            const int64_t count = elements_here(c, w, here);
            if (w->unit != u) continue;
            CHECK_MSG(params[i].count == count, "%s has %lld elements, expected %lld", w->name,
                      (long long)params[i].count, (long long)count);
            for (int64_t k = 0; k < count; k++)
                if (!test_close((double)params[i].value[k], storage->value[here[k]], 2e-5)) {
                    CHECK_MSG(false, "rank %d: %s[%lld] is %.9g, expected %.9g", c->at.rank,
                              w->name, (long long)here[k], (double)params[i].value[k],
                              storage->value[here[k]]);
                    break;
                }
        }
        TRY(dtrain_strategy_release(s, u));
    }
    TRY(dtrain_strategy_weight(s, weight_of(c, sample)));
    dtrain_comm *tensor = dtrain_mesh_comm(c->mesh, DTRAIN_AXIS_TENSOR);
    for (uint32_t u = UNITS; u-- > 0;) {
        TRY(dtrain_strategy_gather(s, u, DTRAIN_PASS_BACKWARD));
        for (int i = c->count; i-- > 0;) {
            const whole_param *w = &c->params[i];
            if (c->slow && drawn(c->seed, 74, sample, (uint64_t)i, (uint64_t)c->at.rank) % 4 == 0)
                ranks_sleep_us(100); /* ranks come to different moments */
            if (w->unit != u || w->flags || !has_gradient(c, sample, i)) continue;
            const int64_t count = elements_here(c, w, here);
            for (int64_t k = 0; k < count; k++) {
                const double g = w->axis ? sample_grad(c, sample, i, here[k], 0)
                                         : partial_grad(c, sample, i, here[k], c->at.tensor_rank);
                params[i].grad[k] =
                    (float)g + (params[i].state.grad_written ? params[i].grad[k] : 0);
            }
            TRY(dtrain_strategy_ready(s, (size_t)i));
        }
        int32_t one = 1; /* operations add up over the tensor axis meanwhile */
        TRY(dtrain_all_reduce(tensor, &one, &one, 1, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_SUM, NULL));
        CHECK(one == c->tensor);
        TRY(dtrain_strategy_release(s, u));
    }
    return dtrain_strategy_finish(s);
}

/* The gradients of the step, which a loop of its own would have divided by the number of micro-batches, and their norm;
 * of each storage whether any rank had one. */
static double oracle_grads(program *c, int step, bool *had)
{
    double weights = 0, squares = 0;
    for (int i = 0; i < c->count; i++) memset(c->params[i].grad, 0, sizeof c->params[i].grad);
    memset(had, 0, MOST * sizeof *had);
    for (int micro = 0; micro < c->micros; micro++)
        for (int d = 0; d < c->data; d++) {
            const uint64_t sample = sample_of(c, step, micro, d);
            if (!has_samples(c, step, micro, d)) continue;
            weights += (double)weight_of(c, sample);
            for (int i = 0; i < c->count; i++) {
                const int storage = c->params[i].alias < 0 ? i : c->params[i].alias;
                if (c->params[i].flags || !has_gradient(c, sample, i)) continue;
                had[storage] = true;
                for (int64_t e = 0; e < c->params[i].count; e++)
                    c->params[storage].grad[e] += sample_grad(c, sample, i, e, 0);
            }
        }
    for (int i = 0; i < c->count && weights > 0; i++)
        for (int64_t e = 0; e < c->params[i].count; e++) {
            c->params[i].grad[e] *= c->micros / weights;
            squares += c->params[i].grad[e] * c->params[i].grad[e];
        }
    return weights > 0 ? sqrt(squares) : -1;
}

/* SGD with momentum and weight decay, of parameters that had a gradient. */
static void oracle_update(program *c, const bool *had, double factor, double lr)
{
    for (int i = 0; i < c->count; i++) {
        whole_param *p = &c->params[i];
        if (p->alias >= 0 || p->flags || !had[i]) continue;
        for (int64_t e = 0; e < p->count; e++) {
            const double g = p->grad[e] * factor + (p->shape[1] ? 0.1 * p->value[e] : 0);
            p->momentum[e] = p->stepped ? 0.5 * p->momentum[e] + g : g;
            p->value[e] -= lr * p->momentum[e];
        }
        p->stepped = true;
    }
}

/* The same word on all ranks. */
static void check_same(const program *c, const void *word, size_t bytes, const char *what)
{
    char all[8 * RANKS_MOST];
    if (!CHECK(dtrain_world_all_gather(c->world, word, bytes, all) == DTRAIN_OK)) return;
    for (int r = 1; r < c->at.ranks; r++)
        CHECK_MSG(memcmp(all, all + (size_t)r * bytes, bytes) == 0,
                  "seed %llu: %s differs between ranks 0 and %d", (unsigned long long)c->seed, what,
                  r);
}

static int take_step(program *c, dtrain_strategy *s, dtrain_param *params, dtrain_optimizer *sgd,
                     int step)
{
    bool had[MOST], over = false;
    float norm, scale;
    for (int micro = 0; micro < c->micros; micro++) {
        RANKS_TRY(dtrain_strategy_accumulate(s, micro + 1 < c->micros));
        if (has_samples(c, step, micro, c->at.data_rank))
            RANKS_TRY(take_backward(c, s, params, sample_of(c, step, micro, c->at.data_rank)));
        else RANKS_TRY(dtrain_strategy_join(s, &over));
    }
    const double expected = oracle_grads(c, step, had);
    RANKS_TRY(dtrain_grad_norm(s, NULL, c->max_norm, &norm, &scale));
    check_same(c, &norm, sizeof norm, "the norm");
    if (expected >= 0)
        CHECK_MSG(fabs((double)norm - expected) <= 1e-5 * expected,
                  "seed %llu, rank %d, step %d: the norm is %.9g, expected %.9g",
                  (unsigned long long)c->seed, c->at.rank, step, (double)norm, expected);
    RANKS_TRY(dtrain_optimizer_step(sgd, 0.125f, scale));
    if (expected >= 0)
        oracle_update(
            c, had, c->max_norm > 0 && c->max_norm < expected ? (double)c->max_norm / expected : 1,
            0.125);
    uint64_t hash;
    RANKS_TRY(dtrain_strategy_verify(s, &hash));
    check_same(c, &hash, sizeof hash, "the hash of verify");
    return 0;
}

static int check_values(program *c, dtrain_strategy *s)
{
    float *read = c->read;
    for (int i = 0; i < c->count; i++) {
        const whole_param *p = &c->params[i], *storage = p->alias < 0 ? p : &c->params[p->alias];
        RANKS_TRY(dtrain_strategy_read(s, (size_t)i, read));
        for (int64_t e = 0; e < p->count; e++)
            if (!test_close((double)read[e], storage->value[e], 2e-5)) {
                CHECK_MSG(false, "seed %llu, rank %d: read of %s[%lld] gives %.9g, expected %.9g",
                          (unsigned long long)c->seed, c->at.rank, p->name, (long long)e,
                          (double)read[e], storage->value[e]);
                break;
            }
    }
    return 0;
}

/* The values that the library draws without any mesh, to the bit those of any. */
static int first_values(program *c, dtrain_strategy *s)
{
    float *read = c->read;
    dtrain_param params[MOST];
    dtrain_strategy_desc desc;
    dtrain_strategy *alone;
    dtrain_comm *self;
    RANKS_TRY(dtrain_comm_split(dtrain_world_comm(c->world), c->at.rank, 0, &self));
    memset(&desc, 0, sizeof desc);
    desc.comm = self;
    registered(c, params);
    RANKS_TRY(dtrain_strategy_create(c->world, params, (size_t)c->count, &desc, &alone));
    for (int i = 0; i < c->count; i++) {
        RANKS_TRY(dtrain_strategy_read(s, (size_t)i, read));
        CHECK_MSG(memcmp(read, params[i].value, (size_t)c->params[i].count * sizeof *read) == 0,
                  "seed %llu: first values of %s", (unsigned long long)c->seed, c->params[i].name);
        for (int64_t e = 0; e < c->params[i].count; e++)
            c->params[i].value[e] = (double)params[i].value[e];
    }
    dtrain_strategy_destroy(alone);
    dtrain_comm_destroy(self);
    return 0;
}

/* A value that one tensor rank has changed of what is whole is found, by all ranks. */
static int drift(const program *c, dtrain_strategy *s)
{
    const dtrain_shard *shards;
    size_t count;
    if (c->tensor == 1) return 0;
    RANKS_TRY(dtrain_strategy_shards(s, &shards, &count));
    for (size_t k = 0; k < count; k++)
        if (!shards[k].param->cut.axis && c->at.tensor_rank == 1) shards[k].value[0] += 0.5f;
    RANKS_TRY(dtrain_strategy_publish(s));
    const dtrain_result result = dtrain_strategy_verify(s, NULL);
    CHECK_MSG(result == DTRAIN_ERROR_MISMATCH && strstr(dtrain_last_error(), "\"p1\""),
              "seed %llu, rank %d: %s", (unsigned long long)c->seed, c->at.rank,
              dtrain_last_error());
    return 0;
}

/* What was planned is what the rank with most holds. */
static int check_plan(const program *c, dtrain_strategy *s)
{
    dtrain_param params[MOST];
    dtrain_mesh_desc mesh;
    dtrain_mesh *plan;
    dtrain_memory memory;
    dtrain_strategy_info info;
    dtrain_strategy_desc desc = c->desc;
    uint64_t all[RANKS_MOST], most = 0, elements = 0;
    dtrain_strategy_query(s, &info);
    for (int i = 0; i < c->count; i++)
        if (c->params[i].alias < 0) elements += (uint64_t)c->params[i].count;
    CHECK(info.total_elements == elements);
    const uint64_t held = info.value_bytes + info.grad_bytes + info.buffer_bytes;
    RANKS_TRY(dtrain_world_all_gather(c->world, &held, sizeof held, all));
    for (int r = 0; r < c->at.ranks; r++)
        if (all[r] > most) most = all[r];
    memset(&mesh, 0, sizeof mesh);
    mesh.tensor = c->tensor;
    mesh.sequence_parallel = c->sequence_parallel;
    mesh.ranks = c->at.ranks;
    RANKS_TRY(dtrain_mesh_create(NULL, &mesh, &plan));
    desc.mesh = plan;
    desc.optimizer_states = DTRAIN_OPTIMIZER_STATES_NONE;
    registered(c, params);
    RANKS_TRY(dtrain_strategy_plan(params, (size_t)c->count, &desc, c->at.ranks, &memory));
    if (!c->host_grads)
        CHECK_MSG(memory.total == most, "seed %llu: planned %llu bytes, held %llu",
                  (unsigned long long)c->seed, (unsigned long long)memory.total,
                  (unsigned long long)most);
    CHECK(dtrain_strategy_plan(params, (size_t)c->count, &desc, c->at.ranks + 1, &memory) ==
              DTRAIN_ERROR_ARGUMENT &&
          strstr(dtrain_last_error(), "rank_count"));
    dtrain_mesh_destroy(plan);
    return 0;
}

/* ---- A program ------------------------------------------------------------------------------------ */

static int open_mesh(program *c, dtrain_world *world)
{
    dtrain_mesh_desc mesh;
    memset(&mesh, 0, sizeof mesh);
    mesh.tensor = c->tensor;
    mesh.sequence_parallel = c->sequence_parallel;
    c->world = world;
    RANKS_TRY(dtrain_mesh_create(world, &mesh, &c->mesh));
    dtrain_mesh_query(c->mesh, &c->at);
    c->desc.mesh = c->mesh;
    return 0;
}

static int play(program *c, dtrain_world *world)
{
    dtrain_param params[MOST];
    dtrain_compression_desc topk;
    dtrain_strategy *s;
    dtrain_optimizer *sgd;
    dtrain_optimizer_desc desc = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    int failed = open_mesh(c, world);
    if (failed) return failed;
    memset(&topk, 0, sizeof topk);
    topk.kind = DTRAIN_COMPRESSION_TOPK; /* all elements: another way to the same sums */
    topk.topk_ratio = 1;
    topk.dense_below = 1;
    topk.dense_steps = DTRAIN_DENSE_STEPS_NONE;
    if (c->topk) c->desc.compression = &topk;
    make_model(c);
    registered(c, params);
    for (int i = 0; i < c->count && c->host_grads && c->at.rank % 2; i++)
        if (c->params[i].alias < 0 && !c->params[i].flags) params[i].grad = c->own[i];
    RANKS_TRY(dtrain_strategy_create(world, params, (size_t)c->count, &c->desc, &s));
    desc.momentum = 0.5f;
    desc.weight_decay = 0.1f;
    RANKS_TRY(dtrain_optimizer_create(world, s, &desc, &sgd));
    failed = first_values(c, s) || check_plan(c, s);
    for (int step = 0; step < STEPS && !failed; step++) failed = take_step(c, s, params, sgd, step);
    if (!failed) failed = check_values(c, s) || drift(c, s);
    dtrain_optimizer_destroy(sgd);
    dtrain_strategy_destroy(s);
    dtrain_mesh_destroy(c->mesh);
    return failed;
}

static int program_rank(dtrain_world *world, void *user)
{
    program *mine = (program *)malloc(sizeof *mine); /* the oracle's values are each rank's own */
    if (!mine) return 1;
    *mine = *(const program *)user;
    const int failed = play(mine, world);
    free(mine);
    return failed;
}

/* ---- Random programs ------------------------------------------------------------------------------ */

static program random_program(uint64_t seed)
{
    static const int sizes[][2] = {{2, 1}, {3, 1}, {4, 1}, {2, 2}, {3, 2}, {2, 3},
                                   {2, 4}, {4, 2}, {1, 4}, {1, 1}, {2, 2}, {2, 4}};
    uint64_t state = seed;
    program c;
    memset(&c, 0, sizeof c);
    c.seed = seed;
    const int size = (int)ranks_random(&state, sizeof sizes / sizeof sizes[0]);
    c.tensor = sizes[size][0];
    c.data = sizes[size][1];
    c.sequence_parallel = c.tensor > 1 && ranks_random(&state, 2);
    c.joins = ranks_random(&state, 4) == 0;
    c.lacks = ranks_random(&state, 3) == 0;
    c.host_grads = ranks_random(&state, 4) == 0;
    c.slow = ranks_random(&state, 3) == 0;
    c.micros = 1 + (int)ranks_random(&state, MICROS);
    c.max_norm = ranks_random(&state, 3) ? 0.5f : 0;
    dtrain_strategy_desc *desc = &c.desc;
    desc->kind = DTRAIN_STRATEGY_DDP + (uint32_t)ranks_random(&state, 6);
    const bool grads = desc->kind >= DTRAIN_STRATEGY_SHARD_GRAD_OP;
    const bool hybrid = desc->kind == DTRAIN_STRATEGY_HYBRID_SHARD;
    if (hybrid) desc->node_size = c.data % 2 || ranks_random(&state, 3) == 0 ? 1 : 2;
    if (grads && ranks_random(&state, 2))
        desc->accumulation = hybrid && ranks_random(&state, 2) ? DTRAIN_ACCUMULATION_EVERY
                                                               : DTRAIN_ACCUMULATION_LAST;
    desc->no_overlap = ranks_random(&state, 3) == 0;
    desc->keep_after_forward =
        desc->kind >= DTRAIN_STRATEGY_FULL_SHARD && ranks_random(&state, 4) == 0;
    if (ranks_random(&state, 2)) desc->bucket_bytes = (size_t)256 << ranks_random(&state, 4);
    if (desc->kind <= DTRAIN_STRATEGY_FULL_SHARD && c.data == 4 && ranks_random(&state, 2)) {
        desc->hierarchical = true;
        desc->node_size = 2;
    }
    if (desc->kind == DTRAIN_STRATEGY_DDP && ranks_random(&state, 3) == 0) c.topk = true;
    return c;
}

static bool run_seed(uint64_t seed, bool words)
{
    program c = random_program(seed);
    const long before = test_shared->failed_checks;
    if (words)
        printf("tensor %d, data %d, kind %u, sequence parallel %d, joins %d, lacks %d, host grads "
               "%d, micros %d, accumulation %u, topk %d, hierarchical %d, node size %u\n",
               c.tensor, c.data, (unsigned)c.desc.kind, c.sequence_parallel, c.joins, c.lacks,
               c.host_grads, c.micros, (unsigned)c.desc.accumulation, c.topk, c.desc.hierarchical,
               (unsigned)c.desc.node_size);
    ranks_run(c.tensor * c.data, DTRAIN_LAUNCH_THREADS, program_rank, &c);
    if (test_shared->failed_checks == before) return true;
    printf("  seed %llu failed\n", (unsigned long long)seed);
    return false;
}

static void test_random_programs(void)
{
    static const uint64_t known[] = {618034128, 618034152, 618034316}; /* that broken code failed */
    int failed = 0;
    const uint64_t first = test_seed();
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) failed += !run_seed(known[i], false);
    const int count = (int)test_draws(60, 300, 1000);
    for (int i = 0; i < count && failed < 5; i++) failed += !run_seed(first + (uint64_t)i, false);
}

/* ---- Chosen ones ---------------------------------------------------------------------------------- */

/* A program of one kind and one micro-batch a step. */
static program plain(int tensor, int data, bool sequence_parallel, uint32_t kind)
{
    program c;
    memset(&c, 0, sizeof c);
    c.seed = 1;
    c.tensor = tensor;
    c.data = data;
    c.sequence_parallel = sequence_parallel;
    c.micros = 1;
    c.max_norm = 0.5f;
    c.desc.kind = kind;
    if (kind == DTRAIN_STRATEGY_HYBRID_SHARD) c.desc.node_size = data > 1 ? (uint32_t)data / 2 : 1;
    return c;
}

/* Every kind with and without sequence parallelism, values against the oracle. */
static void test_every_kind(void)
{
    for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_HYBRID_SHARD; kind++)
        for (int parallel = 0; parallel < 2; parallel++) {
            program c = plain(2, 2, parallel, kind);
            c.micros = 2;
            ranks_run(4, DTRAIN_LAUNCH_THREADS, program_rank, &c);
        }
}

/* Make the mesh, the model and the strategy; the caller ends all three by `close_all`. */
static int open_all(program *c, dtrain_world *world, dtrain_param *params, dtrain_strategy **s)
{
    if (open_mesh(c, world)) return 1;
    make_model(c);
    registered(c, params);
    RANKS_TRY(dtrain_strategy_create(world, params, (size_t)c->count, &c->desc, s));
    return 0;
}
static int close_all(const program *c, dtrain_strategy *s)
{
    dtrain_strategy_destroy(s);
    dtrain_mesh_destroy(c->mesh);
    return 0;
}

/* The gradients of eight samples, dealt to as many data ranks as there are, have one norm in all layouts. */
typedef struct layouts {
    program c;
    int layout;
    float *norms;
} layouts;

static int layout_rank(dtrain_world *world, void *user)
{
    const layouts *all = (const layouts *)user;
    program *c = (program *)malloc(sizeof *c);
    dtrain_param params[MOST];
    dtrain_strategy *s;
    float norm, scale;
    if (!c) return 1;
    *c = all->c;
    if (open_all(c, world, params, &s)) return 1;
    c->micros = 8 / c->data;
    for (int micro = 0; micro < c->micros; micro++) {
        RANKS_TRY(dtrain_strategy_accumulate(s, micro + 1 < c->micros));
        const uint64_t sample = (uint64_t)(micro * c->data + c->at.data_rank);
        for (uint32_t u = 0; u < UNITS; u++) {
            RANKS_TRY(dtrain_strategy_gather(s, u, DTRAIN_PASS_FORWARD));
            RANKS_TRY(dtrain_strategy_release(s, u));
        }
        for (uint32_t u = UNITS; u-- > 0;) {
            RANKS_TRY(dtrain_strategy_gather(s, u, DTRAIN_PASS_BACKWARD));
            for (int i = c->count; i-- > 0;) {
                const whole_param *w = &c->params[i];
                if (w->unit != u || w->flags) continue;
                const int64_t count = elements_here(c, w, c->here);
                for (int64_t k = 0; k < count; k++) {
                    const double g =
                        w->axis ? sample_grad(c, sample, i, c->here[k], 0)
                                : partial_grad(c, sample, i, c->here[k], c->at.tensor_rank);
                    params[i].grad[k] = (float)g / (float)c->micros +
                                        (params[i].state.grad_written ? params[i].grad[k] : 0);
                }
                RANKS_TRY(dtrain_strategy_ready(s, (size_t)i));
            }
        }
        RANKS_TRY(dtrain_strategy_finish(s));
    }
    RANKS_TRY(dtrain_grad_norm(s, NULL, 1, &norm, &scale));
    check_same(c, &norm, sizeof norm, "the norm");
    CHECK(scale < 1); /* clipping is active */
    all->norms[all->layout] = norm;
    close_all(c, s);
    free(c);
    return 0;
}

static void test_one_norm(void)
{
    static const int sizes[12][3] = {{1, 1, 0}, {2, 1, 0}, {3, 1, 1}, {4, 1, 0},
                                     {1, 2, 0}, {2, 2, 1}, {3, 2, 0}, {4, 2, 1},
                                     {1, 4, 0}, {2, 4, 0}, {1, 8, 0}, {2, 4, 1}};
    layouts all;
    double squares = 0;
    all.norms = (float *)ranks_shared(12 * sizeof(float));
    for (all.layout = 0; all.layout < 12; all.layout++) {
        const int *size = sizes[all.layout];
        all.c = plain(size[0], size[1], size[2], DTRAIN_STRATEGY_DDP + (uint32_t)all.layout % 5);
        ranks_run(size[0] * size[1], DTRAIN_LAUNCH_THREADS, layout_rank, &all);
    }
    program *c = (program *)malloc(sizeof *c); /* the mean over all samples, in double */
    if (!CHECK(c)) return;
    *c = plain(1, 1, false, DTRAIN_STRATEGY_DDP);
    make_model(c);
    for (int i = 0; i < c->count; i++)
        for (int64_t e = 0; e < c->params[i].count; e++) {
            double sum = 0;
            for (uint64_t sample = 0; sample < 8; sample++)
                for (int k = 0; k < c->count; k++)
                    if (k == i || c->params[k].alias == i) sum += sample_grad(c, sample, k, e, 0);
            if (c->params[i].alias < 0 && !c->params[i].flags) squares += sum * sum / 64;
        }
    free(c);
    for (int k = 0; k < 12; k++)
        CHECK_MSG(fabs((double)all.norms[k] - sqrt(squares)) < 1e-6 * sqrt(squares),
                  "tensor %d x data %d: the norm is %.9g, expected %.9g", sizes[k][0], sizes[k][1],
                  (double)all.norms[k], sqrt(squares));
}

/* An overflow in one rank's part of one parameter is an overflow on all. */
static int overflow_rank(dtrain_world *world, void *user)
{
    program *c = (program *)malloc(sizeof *c);
    dtrain_param params[MOST];
    dtrain_strategy *s;
    float norm, scale;
    if (!c) return 1;
    *c = *(const program *)user;
    if (open_all(c, world, params, &s)) return 1;
    for (uint32_t u = UNITS; u-- > 0;) {
        RANKS_TRY(dtrain_strategy_gather(s, u, DTRAIN_PASS_BACKWARD));
        for (int i = 0; i < c->count; i++) {
            if (c->params[i].unit != u || c->params[i].flags) continue;
            for (int64_t k = 0; k < params[i].count; k++) params[i].grad[k] = 1;
            if (i == 4 && c->at.rank == c->at.ranks - 1) params[i].grad[0] = INFINITY;
            RANKS_TRY(dtrain_strategy_ready(s, (size_t)i));
        }
    }
    RANKS_TRY(dtrain_strategy_finish(s));
    RANKS_TRY(dtrain_grad_norm(s, NULL, 1, &norm, &scale));
    CHECK_MSG(!isfinite(norm), "rank %d of kind %u: the norm is %g", c->at.rank,
              (unsigned)c->desc.kind, (double)norm);
    close_all(c, s);
    free(c);
    return 0;
}

static void test_overflow(void)
{
    for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_HYBRID_SHARD; kind++) {
        program c = plain(2, 2, kind % 2, kind);
        ranks_run(4, DTRAIN_LAUNCH_THREADS, overflow_rank, &c);
    }
}

/* What a step sends along the data axis is what a rank without peers counts; one that is first on neither axis can. */
static int bytes_rank(dtrain_world *world, void *user)
{
    program *c = (program *)malloc(sizeof *c);
    dtrain_param params[MOST];
    dtrain_strategy *s;
    dtrain_strategy_info info;
    dtrain_comm_info before, after, counted;
    if (!c) return 1;
    *c = *(const program *)user;
    if (open_all(c, world, params, &s)) return 1;
    dtrain_strategy_query(s, &info);
    CHECK(info.comm == dtrain_mesh_comm(c->mesh, DTRAIN_AXIS_DATA));
    bool over;
    dtrain_comm_query(info.comm, &before);
    RANKS_TRY(dtrain_strategy_join(s, &over));
    RANKS_TRY(dtrain_strategy_publish(s));
    dtrain_comm_query(info.comm, &after);
    CHECK(over);
    close_all(c, s);
    if (dtrain_world_rank(world) == 3) {
        dtrain_strategy_desc desc = c->desc;
        desc.mesh = NULL;
        registered(c, params);
        RANKS_TRY(null_step(world, params, (size_t)c->count, desc, 0, c->tensor, 1, &counted));
        CHECK_MSG(after.wire_bytes - before.wire_bytes == counted.wire_bytes && counted.wire_bytes,
                  "kind %u: counted %llu bytes, sent %llu", (unsigned)c->desc.kind,
                  (unsigned long long)counted.wire_bytes,
                  (unsigned long long)(after.wire_bytes - before.wire_bytes));
    }
    free(c);
    return 0;
}

static void test_bytes_of_step(void)
{
    for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_ZERO3; kind++) {
        program c = plain(2, 2, false, kind);
        ranks_run(4, DTRAIN_LAUNCH_THREADS, bytes_rank, &c);
    }
}

/* ---- Errors --------------------------------------------------------------------------------------- */

#define FAILS(call, code, part)                                      \
    CHECK_MSG((call) == (code) && strstr(dtrain_last_error(), part), \
              "%s: expected \"%s\" in \"%s\"", #call, part, dtrain_last_error())

/* Wrong arguments, on all ranks or on one, are one error on all; the world goes on. */
static int refused_rank(dtrain_world *world, void *user)
{
    program *c = (program *)malloc(sizeof *c);
    dtrain_param params[MOST];
    dtrain_strategy *s;
    dtrain_mesh_desc lone;
    dtrain_mesh *plan;
    dtrain_optimizer *optimizer;
    if (!c) return 1;
    *c = *(const program *)user;
    if (open_mesh(c, world)) return 1;
    make_model(c);
    registered(c, params);
    const size_t count = (size_t)c->count;
    dtrain_strategy_desc desc = c->desc;
    desc.comm = dtrain_world_comm(world);
    FAILS(dtrain_strategy_create(world, params, count, &desc, &s), DTRAIN_ERROR_ARGUMENT,
          "leave comm NULL");
    desc = c->desc;
    memset(&lone, 0, sizeof lone);
    lone.ranks = c->at.ranks;
    RANKS_TRY(dtrain_mesh_create(NULL, &lone, &plan));
    if (c->at.rank == 1) desc.mesh = plan;
    FAILS(dtrain_strategy_create(world, params, count, &desc, &s), DTRAIN_ERROR_ARGUMENT,
          "for plans");
    dtrain_mesh_destroy(plan);
    desc = c->desc;
    if (c->at.rank == 2) desc.mesh = NULL;
    FAILS(dtrain_strategy_create(world, params, count, &desc, &s), DTRAIN_ERROR_MISMATCH,
          "rank 2 has a mesh of tensor 1, the others have a mesh of tensor 2");
    if (c->at.rank == 3) params[2].cut.parts = 2;
    FAILS(dtrain_strategy_create(world, params, count, &c->desc, &s), DTRAIN_ERROR_MISMATCH,
          "rank 3 has cut.parts 2");
    registered(c, params);
    params[7].unit = 2 + (uint32_t)c->at.tensor_rank; /* the same along each data axis */
    FAILS(dtrain_strategy_create(world, params, count, &c->desc, &s), DTRAIN_ERROR_MISMATCH,
          "\"p7\"");
    registered(c, params);
    params[4].shape[1] = 1;
    FAILS(dtrain_strategy_create(world, params, count, &c->desc, &s), DTRAIN_ERROR_ARGUMENT, "p4");
    registered(c, params);
    params[4].group = 1;
    RANKS_TRY(dtrain_strategy_create(world, params, count, &c->desc, &s));
    dtrain_optimizer_desc sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    dtrain_optimizer_desc muon = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON);
    sgd.groups = &muon;
    sgd.group_count = 1;
    FAILS(dtrain_optimizer_create(world, s, &sgd, &optimizer), DTRAIN_ERROR_UNSUPPORTED,
          "its cut by columns");
    close_all(c, s);
    free(c);
    return 0;
}

static void test_refused(void)
{
    program c = plain(2, 2, false, DTRAIN_STRATEGY_DDP);
    ranks_run(4, DTRAIN_LAUNCH_THREADS, refused_rank, &c);
}

/* Ranks of one tensor axis that read different samples are told so, all of them. */
static int different_samples_rank(dtrain_world *world, void *user)
{
    program *c = (program *)malloc(sizeof *c);
    dtrain_param params[MOST];
    dtrain_strategy *s;
    float norm, scale;
    if (!c) return 1;
    *c = *(const program *)user;
    if (open_all(c, world, params, &s)) return 1;
    for (int i = 0; i < c->count; i++) {
        if (c->params[i].flags) continue;
        for (int64_t k = 0; k < params[i].count; k++)
            params[i].grad[k] = c->at.rank == 1 && i == 1 ? 1.5f : 1;
        RANKS_TRY(dtrain_strategy_ready(s, (size_t)i));
    }
    RANKS_TRY(dtrain_strategy_finish(s));
    FAILS(dtrain_grad_norm(s, NULL, 1, &norm, &scale), DTRAIN_ERROR_MISMATCH,
          "the same program on the same samples");
    close_all(c, s);
    free(c);
    return 0;
}

static void test_different_samples(void)
{
    program c = plain(2, 1, false, DTRAIN_STRATEGY_DDP);
    ranks_run(2, DTRAIN_LAUNCH_THREADS, different_samples_rank, &c);
}

/* A rank that gives up in the middle of a backward brings its reason to all ranks of the mesh, those too that
 * share no axis with it. */
static int gives_up_rank(dtrain_world *world, void *user)
{
    program *c = (program *)malloc(sizeof *c);
    dtrain_param params[MOST];
    dtrain_strategy *s;
    if (!c) return 1;
    *c = *(const program *)user;
    if (open_all(c, world, params, &s)) return 1;
    RANKS_TRY(dtrain_strategy_gather(s, 2, DTRAIN_PASS_BACKWARD));
    for (int64_t k = 0; k < params[6].count; k++) params[6].grad[k] = 1;
    RANKS_TRY(dtrain_strategy_ready(s, 6));
    if (c->at.rank) {
        float norm, scale;
        dtrain_result result = dtrain_strategy_finish(s);
        if (result == DTRAIN_OK) result = dtrain_grad_norm(s, NULL, 1, &norm, &scale);
        CHECK_MSG(result != DTRAIN_OK && strstr(dtrain_last_error(), "in the middle of a backward"),
                  "rank %d: %s", c->at.rank, dtrain_last_error());
    }
    close_all(c, s);
    free(c);
    return 0;
}

static void test_gives_up(void)
{
    for (int parallel = 0; parallel < 2; parallel++) {
        program c = plain(2, 2, parallel, DTRAIN_STRATEGY_DDP);
        ranks_run(4, DTRAIN_LAUNCH_THREADS, gives_up_rank, &c);
    }
}

/* --seed N runs one program and says what it is, --count N and --seconds S more of them. */
int main(int argc, char **argv)
{
    if (argc > 1 && argv[1][0] == '-') {
        const seeds s = seeds_of(argc, argv, 1000, 20);
        test_begin(1, argv);
        return seeds_run(&s, NULL, 0, run_seed);
    }
    test_begin(argc, argv);
    RUN(test_every_kind);
    RUN(test_one_norm);
    RUN(test_overflow);
    RUN(test_bytes_of_step);
    RUN(test_refused);
    RUN(test_different_samples);
    RUN(test_gives_up);
    RUN(test_random_programs);
    return test_summary();
}
