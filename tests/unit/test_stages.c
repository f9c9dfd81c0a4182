/* test_stages.c: a strategy on a mesh with a pipeline axis: each rank has the parameters of its own stages alone, and
 * what comes of a program has the bits of one that is cut along the other axes only. Programs make their gradients
 * themselves, as multiples of 1/64, so that sums are exact and a tied weight's too has the same bits. Where a unit
 * is, is worked out here by a list of all stages.
 *
 * Seen to fail for each of these, broken on purpose: TIE left out; a tied weight counted by each stage in the norm;
 * counts in which stages speak for each other; copies of a host's values that differ; V for interleaved stages. */
#include "test.h"

#include "dtrain.h"
#include "ranks.h"
#include "seeds.h"

enum { MOST = 24, LONGEST = 192, STEPS = 3, MICROS = 3, UNITS_MOST = 12, STAGES_MOST = 16 };

typedef struct program {
    uint64_t seed;
    int t, p, d;
    uint32_t kind, optimizer;
    dtrain_pipeline_desc line;
    uint32_t list[STAGES_MOST]; /* line.units, or none */
    bool joins, lacks, host_values, no_overlap;
    int ties, micros;
    size_t bucket_bytes;
    float max_norm;
    /* the model, of the seed alone */
    int count, units;
    int64_t shape[MOST][2];
    uint32_t unit[MOST], flags[MOST], cut[MOST];
    int alias[MOST];
    char name[MOST][16];
} program;

/* What a program ends with, as its rank 0 tells. */
typedef struct outcome {
    float values[MOST][LONGEST], norms[STEPS];
    uint64_t hash;
    int ended; /* ranks */
} outcome;

typedef struct launch {
    program c;
    outcome *out;
} launch;

typedef struct rank_of {
    program c;
    dtrain_world *world;
    dtrain_mesh *mesh;
    dtrain_mesh_info at;
    dtrain_param params[MOST];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    float own[MOST][LONGEST];
} rank_of;

static uint64_t drawn(uint64_t seed, uint64_t a, uint64_t b, uint64_t c)
{
    return ranks_mix(ranks_mix(ranks_mix(seed ^ a) ^ b) ^ c);
}

/* ---- The model ------------------------------------------------------------------------------------ */

static int64_t count_of(const program *c, int i)
{
    return c->shape[i][0] * (c->shape[i][1] ? c->shape[i][1] : 1);
}
static int storage_of(const program *c, int i) { return c->alias[i] < 0 ? i : c->alias[i]; }

/* Up to three parameters a unit; some frozen, some cut by rows; ties of later units to the first of unit 0, and of
 * the last unit to one in the middle. */
static void make_model(program *c, uint64_t *random)
{
    c->units = 1 + (int)ranks_random(random, UNITS_MOST);
    for (int u = 0; u < c->units; u++) {
        const int own = 1 + (int)ranks_random(random, c->units < 8 ? 3 : 1);
        for (int k = 0; k < own; k++) {
            const int i = c->count++;
            snprintf(c->name[i], sizeof c->name[i], "p%d", i);
            c->unit[i] = (uint32_t)(100 - 7 * u); /* any numbers */
            c->shape[i][0] = 4 + (int64_t)ranks_random(random, 8);
            c->shape[i][1] = (int64_t)ranks_random(random, 15);
            c->cut[i] = ranks_random(random, 2) ? DTRAIN_CUT_ROWS : DTRAIN_CUT_NONE;
            c->flags[i] = i && ranks_random(random, 6) == 0 ? DTRAIN_PARAM_FROZEN : 0;
            c->alias[i] = -1;
        }
    }
    for (int k = 0; k < c->ties && c->count < MOST; k++) {
        const int i = c->count++, target = k == 0 ? 0 : (int)ranks_random(random, (uint64_t)i);
        const int unit = c->units - 1 - (int)ranks_random(random, (uint64_t)(1 + c->units / 2));
        snprintf(c->name[i], sizeof c->name[i], "p%d", i);
        c->alias[i] = storage_of(c, target);
        memcpy(c->shape[i], c->shape[c->alias[i]], sizeof c->shape[i]);
        c->unit[i] = (uint32_t)(100 - 7 * unit);
        c->cut[i] = c->cut[c->alias[i]];
    }
}

static void registered(rank_of *s)
{
    const program *c = &s->c;
    memset(s->params, 0, sizeof s->params);
    for (int i = 0; i < c->count; i++) {
        dtrain_param *p = &s->params[i];
        p->name = c->name[i];
        memcpy(p->shape, c->shape[i], sizeof c->shape[i]);
        p->unit = c->unit[i];
        p->flags = c->flags[i];
        p->cut.axis = c->cut[i];
        p->init = i % 2 ? DTRAIN_INIT_NORMAL : DTRAIN_INIT_UNIFORM;
        p->init_scale = 1;
        if (c->alias[i] >= 0) p->alias_of = &s->params[c->alias[i]];
    }
}

/* ---- Where units are ------------------------------------------------------------------------------ */

static int chunks_of(const program *c)
{
    const bool two = c->line.kind == DTRAIN_PIPELINE_INTERLEAVED;
    return c->p == 1 ? 1 : c->line.chunks ? (int)c->line.chunks : two ? 2 : 1;
}

static int rank_of_stage(const program *c, int stage) { return stage % c->p; }

/* The rank of the pipeline axis with a unit, by dealing units out one by one. */
static int rank_of_unit(const program *c, uint32_t unit)
{
    const int stages = c->p * chunks_of(c), wanted = (int)(100 - unit) / 7;
    int at = 0;
    for (int stage = 0; stage < stages; stage++) {
        const int even = c->units / stages + (stage < c->units % stages);
        for (int k = 0; k < (c->line.units ? (int)c->list[stage] : even); k++)
            if (at++ == wanted) return rank_of_stage(c, stage);
    }
    return -1;
}

/* The first rank that has a storage, at or behind `from`; p: none. */
static int next_holder(const program *c, int storage, int from)
{
    int first = c->p;
    for (int i = 0; i < c->count; i++) {
        const int rank = rank_of_unit(c, c->unit[i]);
        if (storage_of(c, i) == storage && rank >= from && rank < first) first = rank;
    }
    return first;
}
static bool holds(const rank_of *s, int i)
{
    const int rank = s->at.pipeline_rank;
    return next_holder(&s->c, storage_of(&s->c, i), rank) == rank;
}

/* The elements of a part are neighbours: it is cut by rows. */
static int64_t part_of(const rank_of *s, int i, int64_t *first)
{
    const int64_t rows = s->c.shape[i][0], each = count_of(&s->c, i) / rows, t = s->at.tensor;
    const int64_t r = s->at.tensor_rank;
    *first = s->c.cut[i] ? each * (rows * r / t) : 0;
    return s->c.cut[i] ? each * (rows * (r + 1) / t - rows * r / t) : count_of(&s->c, i);
}

/* ---- A step --------------------------------------------------------------------------------------- */

static uint64_t sample_of(const program *c, int step, int micro, int data_rank)
{
    return (uint64_t)((step * MICROS + micro) * c->d + data_rank) + 1;
}
static bool has_samples(const program *c, uint64_t sample)
{
    return !c->joins || drawn(c->seed, 71, sample, 0) % 3;
}
static bool has_gradient(const program *c, uint64_t sample, int i)
{
    return !c->lacks || drawn(c->seed, 72, sample / 4, (uint64_t)i) % 3;
}
static float weight_of(const program *c, uint64_t sample)
{
    return c->seed % 2 ? 1.0f : (float)(1 + drawn(c->seed, 73, sample, 0) % 4) / 4;
}
static float grad_of(const program *c, uint64_t sample, int i, int64_t element)
{
    return (float)((double)(drawn(c->seed, sample, (uint64_t)i, (uint64_t)element) % 257) - 128) /
           64;
}

/* Write or add this rank's gradients of a sample, and mark them, units from the last to the first. */
static dtrain_result take_backward(rank_of *s, uint64_t sample)
{
    const program *c = &s->c;
    TRY(dtrain_strategy_weight(s->strategy, weight_of(c, sample)));
    for (int i = c->count; i-- > 0;) {
        dtrain_param *p = &s->params[i];
        int64_t first;
        const int64_t count = part_of(s, i, &first);
        const bool here = rank_of_unit(c, c->unit[i]) == s->at.pipeline_rank;
        if (!here || c->flags[i] || c->flags[storage_of(c, i)] || !has_gradient(c, sample, i))
            continue;
        for (int64_t k = 0; k < count; k++)
            p->grad[k] =
                grad_of(c, sample, i, first + k) + (p->state.grad_written ? p->grad[k] : 0);
        TRY(dtrain_strategy_ready(s->strategy, (size_t)i));
    }
    return dtrain_strategy_finish(s->strategy);
}

/* The same word on all ranks. */
static void check_same(const rank_of *s, const void *word, size_t bytes, const char *what)
{
    char all[8 * RANKS_MOST];
    if (!CHECK(dtrain_world_all_gather(s->world, word, bytes, all) == DTRAIN_OK)) return;
    for (int r = 1; r < s->at.ranks; r++)
        CHECK_MSG(memcmp(all, all + (size_t)r * bytes, bytes) == 0,
                  "seed %llu: %s differs between ranks 0 and %d", (unsigned long long)s->c.seed,
                  what, r);
}

static dtrain_result take_step(rank_of *s, int step, float *norm)
{
    const program *c = &s->c;
    float scale;
    bool over;
    for (int micro = 0; micro < c->micros; micro++) {
        const uint64_t sample = sample_of(c, step, micro, s->at.data_rank);
        TRY(dtrain_strategy_accumulate(s->strategy, micro + 1 < c->micros));
        if (has_samples(c, sample)) TRY(take_backward(s, sample));
        else TRY(dtrain_strategy_join(s->strategy, &over));
    }
    TRY(dtrain_grad_norm(s->strategy, NULL, c->max_norm, norm, &scale));
    check_same(s, norm, sizeof *norm, "the norm");
    return dtrain_optimizer_step(s->optimizer, 0.125f, scale);
}

static uint64_t bits_of(const float *values, int64_t count)
{
    uint64_t hash = 1;
    for (int64_t k = 0; k < count; k++) {
        uint32_t word;
        memcpy(&word, &values[k], sizeof word);
        hash = ranks_mix(hash ^ word);
    }
    return hash;
}

/* ---- What a rank has ------------------------------------------------------------------------------ */

/* Parameters of other stages have nothing here; what is here is counted to the byte. */
static void check_memory(const rank_of *s)
{
    const program *c = &s->c;
    dtrain_strategy_info info;
    uint64_t elements = 0, whole = 0, trainable = 0;
    dtrain_strategy_query(s->strategy, &info);
    for (int i = 0; i < c->count; i++) {
        const dtrain_param *p = &s->params[i];
        int64_t first;
        const int64_t count = holds(s, i) ? part_of(s, i, &first) : 0;
        const bool elsewhere = rank_of_unit(c, c->unit[i]) != s->at.pipeline_rank;
        CHECK_MSG(p->count == count && p->state.remote == elsewhere,
                  "seed %llu, rank %d: %s has %lld elements, expected %lld, elsewhere %d",
                  (unsigned long long)c->seed, s->at.rank, p->name, (long long)p->count,
                  (long long)count, elsewhere);
        CHECK(count || c->host_values || (!p->value && !p->grad));
        if (c->alias[i] >= 0) continue;
        elements += (uint64_t)count;
        whole += (uint64_t)count_of(c, i);
        trainable += c->flags[i] ? 0 : (uint64_t)count_of(c, i);
    }
    CHECK(info.total_elements == whole && info.trainable_elements == trainable);
    if (c->kind == DTRAIN_STRATEGY_DDP) CHECK(info.value_bytes == 4 * elements);
}

/* A plan, which is made without ranks, is what the rank with most holds. */
static dtrain_result check_plan(rank_of *s)
{
    dtrain_param kept[MOST];
    dtrain_strategy_info info;
    dtrain_mesh_desc mesh;
    dtrain_mesh *plan;
    dtrain_memory memory;
    uint64_t all[RANKS_MOST], most = 0;
    dtrain_strategy_query(s->strategy, &info);
    const uint64_t held = info.value_bytes + info.grad_bytes + info.buffer_bytes;
    TRY(dtrain_world_all_gather(s->world, &held, sizeof held, all));
    for (int r = 0; r < s->at.ranks; r++)
        if (all[r] > most) most = all[r];
    memset(&mesh, 0, sizeof mesh);
    mesh.tensor = s->c.t;
    mesh.pipeline = s->c.p;
    mesh.ranks = s->at.ranks;
    mesh.rank = s->at.rank;
    TRY(dtrain_mesh_create(NULL, &mesh, &plan));
    dtrain_strategy_desc desc = info.desc;
    desc.comm = NULL;
    desc.mesh = plan;
    desc.pipeline = &s->c.line;
    desc.optimizer_states = DTRAIN_OPTIMIZER_STATES_NONE;
    memcpy(kept, s->params, sizeof kept); /* aliases point into the array */
    registered(s);
    TRY(dtrain_strategy_plan(s->params, (size_t)s->c.count, &desc, s->at.ranks, &memory));
    for (int i = 0; i < s->c.count; i++) CHECK(s->params[i].count == kept[i].count);
    memcpy(s->params, kept, sizeof kept);
    CHECK_MSG(s->c.host_values || memory.total == most, "seed %llu: planned %llu bytes, held %llu",
              (unsigned long long)s->c.seed, (unsigned long long)memory.total,
              (unsigned long long)most);
    dtrain_mesh_destroy(plan);
    return DTRAIN_OK;
}

/* A copy of a tied weight that one stage alone changes is found by all ranks. */
static dtrain_result check_drift(rank_of *s)
{
    const program *c = &s->c;
    int tied = -1, first = 0;
    for (int i = 0; i < c->count && tied < 0; i++) {
        first = next_holder(c, i, 0);
        if (c->alias[i] < 0 && !c->flags[i] && next_holder(c, i, first + 1) < c->p) tied = i;
    }
    if (tied < 0) return DTRAIN_OK;
    const dtrain_shard *shards;
    size_t count;
    TRY(dtrain_strategy_shards(s->strategy, &shards, &count));
    for (size_t k = 0; k < count; k++)
        if (shards[k].param == &s->params[tied] && s->at.pipeline_rank == first && shards[k].count)
            shards[k].value[0] += 0.5f;
    TRY(dtrain_strategy_publish(s->strategy));
    const dtrain_result result = dtrain_strategy_verify(s->strategy, NULL);
    CHECK_MSG(result == DTRAIN_ERROR_MISMATCH && strstr(dtrain_last_error(), c->name[tied]) &&
                  strstr(dtrain_last_error(), "tied"),
              "seed %llu, rank %d: %s", (unsigned long long)c->seed, s->at.rank,
              dtrain_last_error());
    return DTRAIN_OK;
}

/* ---- A program ------------------------------------------------------------------------------------ */

/* Values of the host's own: those of rank 0 of each data axis, and of the first stage, count. */
static void own_values(rank_of *s)
{
    for (int i = 0; i < s->c.count; i++) {
        int64_t first;
        const int64_t count = part_of(s, i, &first);
        const bool good = s->at.data_rank == 0 && s->at.pipeline_rank == next_holder(&s->c, i, 0);
        if (s->c.alias[i] >= 0 || i % 3) continue;
        for (int64_t k = 0; k < count; k++)
            s->own[i][k] = good ? (float)((first + k) % 7) - 3 : 1000.0f + (float)s->at.rank;
        s->params[i].value = s->own[i];
    }
}

static dtrain_result rank_open(rank_of *s)
{
    program *c = &s->c;
    dtrain_mesh_desc mesh;
    dtrain_strategy_desc desc;
    dtrain_optimizer_desc how = dtrain_optimizer_defaults((dtrain_optimizer_kind)c->optimizer);
    memset(&mesh, 0, sizeof mesh);
    memset(&desc, 0, sizeof desc);
    mesh.tensor = c->t;
    mesh.pipeline = c->p;
    TRY(dtrain_mesh_create(s->world, &mesh, &s->mesh));
    dtrain_mesh_query(s->mesh, &s->at);
    registered(s);
    if (c->host_values) own_values(s);
    c->line.units = c->line.units ? c->list : NULL;
    desc.kind = c->kind;
    desc.mesh = s->mesh;
    desc.pipeline = c->p > 1 ? &c->line : NULL;
    desc.no_overlap = c->no_overlap;
    desc.bucket_bytes = c->bucket_bytes;
    desc.init_seed = c->seed;
    TRY(dtrain_strategy_create(s->world, s->params, (size_t)c->count, &desc, &s->strategy));
    how.weight_decay = 0.1f;
    if (c->optimizer == DTRAIN_OPTIMIZER_SGD) how.momentum = 0.5f;
    return dtrain_optimizer_create(s->world, s->strategy, &how, &s->optimizer);
}

static dtrain_result rank_play(rank_of *s, outcome *out)
{
    float read[LONGEST], norm;
    uint64_t hash;
    TRY(rank_open(s));
    check_memory(s);
    TRY(check_plan(s));
    for (int step = 0; step < STEPS; step++) {
        TRY(take_step(s, step, &norm));
        if (s->at.rank == 0) out->norms[step] = norm;
    }
    TRY(dtrain_strategy_verify(s->strategy, &hash));
    check_same(s, &hash, sizeof hash, "the hash of verify");
    if (s->at.rank == 0) out->hash = hash;
    for (int i = 0; i < s->c.count; i++) {
        TRY(dtrain_strategy_read(s->strategy, (size_t)i, read));
        hash = bits_of(read, count_of(&s->c, i));
        check_same(s, &hash, sizeof hash, "what is read");
        if (s->at.rank == 0)
            memcpy(out->values[i], read, (size_t)count_of(&s->c, i) * sizeof *read);
    }
    return check_drift(s);
}

static void rank_close(rank_of *s)
{
    dtrain_optimizer_destroy(s->optimizer);
    dtrain_strategy_destroy(s->strategy);
    dtrain_mesh_destroy(s->mesh);
}

static int program_rank(dtrain_world *world, void *user)
{
    const launch *l = (const launch *)user;
    rank_of *s = (rank_of *)calloc(1, sizeof *s);
    if (!s) return 1;
    s->c = l->c;
    s->world = world;
    const dtrain_result result = rank_play(s, l->out);
    CHECK_MSG(result == DTRAIN_OK, "seed %llu, rank %d: %s", (unsigned long long)s->c.seed,
              s->at.rank, dtrain_last_error());
    if (result == DTRAIN_OK) __atomic_add_fetch(&l->out->ended, 1, __ATOMIC_RELAXED);
    rank_close(s);
    free(s);
    return 0;
}

static outcome *play(const program *c)
{
    launch l;
    l.c = *c;
    l.out = (outcome *)ranks_shared(sizeof *l.out);
    ranks_run(c->t * c->p * c->d, DTRAIN_LAUNCH_THREADS, program_rank, &l);
    CHECK(l.out->ended == c->t * c->p * c->d);
    return l.out;
}

/* Run a program with and without its pipeline axis. */
static void compare(const program *c)
{
    program alone = *c;
    alone.p = 1;
    memset(&alone.line, 0, sizeof alone.line);
    alone.kind = DTRAIN_STRATEGY_DDP;
    outcome *one = play(&alone), *all = play(c);
    for (int step = 0; step < STEPS; step++)
        CHECK_MSG(one->norms[step] == all->norms[step],
                  "seed %llu, step %d: the norm is %.9g, without stages %.9g",
                  (unsigned long long)c->seed, step, (double)all->norms[step],
                  (double)one->norms[step]);
    CHECK_MSG(one->hash == all->hash, "seed %llu: the hash of verify", (unsigned long long)c->seed);
    for (int i = 0; i < c->count; i++)
        CHECK_MSG(memcmp(one->values[i], all->values[i], sizeof one->values[i]) == 0,
                  "seed %llu: %s has other bits than without stages", (unsigned long long)c->seed,
                  c->name[i]);
    munmap(one, sizeof *one);
    munmap(all, sizeof *all);
}

/* ---- Random programs ------------------------------------------------------------------------------ */

/* A list of units a stage, each with one at least. */
static void draw_units(program *c, uint64_t *random)
{
    const int stages = c->p * chunks_of(c);
    for (int s = 0; s < stages; s++) c->list[s] = 1;
    for (int k = stages; k < c->units; k++) c->list[ranks_random(random, (uint64_t)stages)]++;
    c->line.units = c->list;
}

static program random_program(uint64_t seed)
{
    static const int sizes[][3] = {{1, 2, 1}, {1, 2, 2}, {2, 2, 1}, {2, 2, 2},
                                   {1, 4, 1}, {1, 4, 2}, {2, 4, 1}, {1, 8, 1},
                                   {1, 2, 4}, {4, 2, 1}, {1, 3, 2}, {3, 2, 1}};
    uint64_t random = ranks_mix(seed);
    program c;
    memset(&c, 0, sizeof c);
    c.seed = seed;
    const int size = (int)ranks_random(&random, sizeof sizes / sizeof sizes[0]);
    c.t = sizes[size][0];
    c.p = sizes[size][1];
    c.d = sizes[size][2];
    c.kind = ranks_random(&random, 2) ? DTRAIN_STRATEGY_DDP : DTRAIN_STRATEGY_ZERO1;
    c.optimizer = ranks_random(&random, 2) ? DTRAIN_OPTIMIZER_ADAMW : DTRAIN_OPTIMIZER_SGD;
    c.line.kind = (uint32_t)ranks_random(&random, 4);
    c.ties = (int)ranks_random(&random, 4);
    c.joins = c.d > 1 && ranks_random(&random, 4) == 0;
    c.lacks = ranks_random(&random, 3) == 0;
    c.host_values = ranks_random(&random, 3) == 0;
    c.no_overlap = ranks_random(&random, 3) == 0;
    c.micros = 1 + (int)ranks_random(&random, MICROS);
    c.bucket_bytes = ranks_random(&random, 2) ? (size_t)256 << ranks_random(&random, 4) : 0;
    c.max_norm = ranks_random(&random, 3) ? 0.5f : 0;
    make_model(&c, &random);
    while (c.p * chunks_of(&c) > c.units) { /* a model with enough units */
        c.count = 0;
        make_model(&c, &random);
        if (ranks_random(&random, 8) == 0) c.line.kind = DTRAIN_PIPELINE_1F1B, c.p = 2;
    }
    if (ranks_random(&random, 2)) draw_units(&c, &random);
    return c;
}

static bool run_seed(uint64_t seed, bool words)
{
    program c = random_program(seed);
    const long before = test_shared->failed_checks;
    if (words)
        printf("tensor %d, pipeline %d, data %d, kind %u, schedule %u, units %d, ties %d, joins "
               "%d, lacks %d, host "
               "values %d, micros %d, listed %d\n",
               c.t, c.p, c.d, (unsigned)c.kind, (unsigned)c.line.kind, c.units, c.ties, c.joins,
               c.lacks, c.host_values, c.micros, c.line.units != NULL);
    if (c.line.units) c.line.units = c.list;
    compare(&c);
    if (test_shared->failed_checks == before) return true;
    printf("  seed %llu failed\n", (unsigned long long)seed);
    return false;
}

static void test_random_programs(void)
{
    static const uint64_t known[] = {618034197, 618034223, 618034479}; /* that broken code failed */
    const uint64_t first = test_seed();
    const int count = (int)test_draws(50, 300, 1000);
    int failed = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) failed += !run_seed(known[i], false);
    for (int i = 0; i < count && failed < 5; i++) failed += !run_seed(first + (uint64_t)i, false);
}

/* ---- Chosen ones ---------------------------------------------------------------------------------- */

/* Eight units of one parameter each, and a head tied to the first of them. */
static program plain(int t, int p, int d, uint32_t kind, uint32_t schedule)
{
    program c;
    memset(&c, 0, sizeof c);
    c.seed = 1;
    c.t = t;
    c.p = p;
    c.d = d;
    c.kind = kind;
    c.line.kind = schedule;
    c.optimizer = DTRAIN_OPTIMIZER_ADAMW;
    c.micros = 2;
    c.max_norm = 0.5f;
    c.units = 8;
    for (int i = 0; i < 9; i++) {
        snprintf(c.name[i], sizeof c.name[i], "p%d", i);
        c.shape[i][0] = 8;
        c.shape[i][1] = 5;
        c.unit[i] = (uint32_t)(100 - 7 * (i < 8 ? i : 7));
        c.alias[i] = i < 8 ? -1 : 0;
        c.cut[i] = i % 2 ? DTRAIN_CUT_NONE : DTRAIN_CUT_ROWS;
    }
    c.count = 9;
    return c;
}

/* All ordered factorisations of 8 ranks with a pipeline, and every shape of stages. */
static void test_layouts(void)
{
    for (int p = 2; p <= 8; p *= 2)
        for (int t = 1; t * p <= 8; t *= 2)
            for (uint32_t schedule = 0; schedule <= DTRAIN_PIPELINE_ZB_H1; schedule++) {
                if (p == 8 && schedule >= DTRAIN_PIPELINE_INTERLEAVED &&
                    schedule != DTRAIN_PIPELINE_ZB_H1)
                    continue; /* 16 stages, of 8 units */
                program c =
                    plain(t, p, 8 / t / p,
                          schedule % 2 ? DTRAIN_STRATEGY_ZERO1 : DTRAIN_STRATEGY_DDP, schedule);
                compare(&c);
            }
}

/* AUTO takes a kind that stages can have. */
static int auto_rank(dtrain_world *world, void *user)
{
    rank_of *s = (rank_of *)calloc(1, sizeof *s);
    dtrain_mesh_desc mesh;
    dtrain_strategy_desc desc;
    dtrain_strategy_info info;
    if (!s) return 1;
    (void)user;
    s->c = plain(1, 2, 2, DTRAIN_STRATEGY_AUTO, DTRAIN_PIPELINE_1F1B);
    memset(&mesh, 0, sizeof mesh);
    memset(&desc, 0, sizeof desc);
    mesh.pipeline = 2;
    RANKS_TRY(dtrain_mesh_create(world, &mesh, &s->mesh));
    registered(s);
    desc.kind = DTRAIN_STRATEGY_AUTO;
    desc.mesh = s->mesh;
    RANKS_TRY(dtrain_strategy_create(world, s->params, 9, &desc, &s->strategy));
    dtrain_strategy_query(s->strategy, &info);
    CHECK_MSG(info.desc.kind == DTRAIN_STRATEGY_ZERO1, "%s: %s", info.name, info.reason);
    rank_close(s);
    free(s);
    return 0;
}
static void test_auto(void) { ranks_run(4, DTRAIN_LAUNCH_THREADS, auto_rank, NULL); }

/* A step sends gradients along the data axis, and little beside them, stage by stage, with a tied weight; the strategy
 * counts the same. */
static int bytes_rank(dtrain_world *world, void *user)
{
    rank_of *s = (rank_of *)calloc(1, sizeof *s);
    dtrain_strategy_info info, now;
    dtrain_comm_info before, after;
    bool over;
    if (!s) return 1;
    s->c = *(const program *)user;
    s->world = world;
    RANKS_TRY(rank_open(s));
    dtrain_strategy_query(s->strategy, &info);
    CHECK(info.comm == dtrain_mesh_comm(s->mesh, DTRAIN_AXIS_DATA));
    dtrain_comm_query(info.comm, &before);
    RANKS_TRY(dtrain_strategy_join(s->strategy, &over));
    RANKS_TRY(dtrain_strategy_publish(s->strategy));
    dtrain_comm_query(info.comm, &after);
    dtrain_strategy_query(s->strategy, &now);
    const uint64_t sent = after.wire_bytes - before.wire_bytes;
    CHECK_MSG(over && now.traffic.wire_bytes - info.traffic.wire_bytes == sent,
              "rank %d: counted %llu bytes, sent %llu", s->at.rank,
              (unsigned long long)(now.traffic.wire_bytes - info.traffic.wire_bytes),
              (unsigned long long)sent);
    /* two ranks: half of all twice; the counts have a word for each of at most MOST parameters, and one */
    CHECK_MSG(sent >= info.bucket_bytes && sent <= info.bucket_bytes + 4 * (1 + MOST),
              "rank %d: sent %llu bytes for gradients of %llu", s->at.rank,
              (unsigned long long)sent, (unsigned long long)info.bucket_bytes);
    rank_close(s);
    free(s);
    return 0;
}
static void test_bytes_of_step(void)
{
    for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_ZERO1; kind++) {
        program c = plain(1, 2, 2, kind, DTRAIN_PIPELINE_1F1B);
        ranks_run(4, DTRAIN_LAUNCH_THREADS, bytes_rank, &c);
    }
}

/* ---- Errors --------------------------------------------------------------------------------------- */

#define FAILS(call, code, part)                                      \
    CHECK_MSG((call) == (code) && strstr(dtrain_last_error(), part), \
              "%s: expected \"%s\" in \"%s\"", #call, part, dtrain_last_error())

/* Wrong arguments are one error on all ranks, and the world goes on. */
static int refused_rank(dtrain_world *world, void *user)
{
    rank_of *s = (rank_of *)calloc(1, sizeof *s);
    uint32_t units[4] = {8, 0, 4, 4};
    dtrain_pipeline_desc line = {DTRAIN_PIPELINE_1F1B, 0, units};
    dtrain_compression_desc topk;
    dtrain_strategy_desc desc;
    dtrain_mesh_desc mesh;
    if (!s) return 1;
    (void)user;
    s->world = world;
    s->c = plain(1, 2, 2, DTRAIN_STRATEGY_DDP, DTRAIN_PIPELINE_1F1B);
    memset(&mesh, 0, sizeof mesh);
    memset(&desc, 0, sizeof desc);
    memset(&topk, 0, sizeof topk);
    mesh.pipeline = 2;
    RANKS_TRY(dtrain_mesh_create(world, &mesh, &s->mesh));
    dtrain_mesh_query(s->mesh, &s->at);
    desc.mesh = s->mesh;
    desc.pipeline = &line;
    registered(s);
    FAILS(dtrain_strategy_create(world, s->params, 9, &desc, &s->strategy), DTRAIN_ERROR_ARGUMENT,
          "gives stage 1 of 2 no unit");
    units[1] = 1;
    registered(s);
    FAILS(dtrain_strategy_create(world, s->params, 9, &desc, &s->strategy), DTRAIN_ERROR_ARGUMENT,
          "add up to 9 units, and the parameters belong to 8");
    line.units = NULL;
    line.kind = DTRAIN_PIPELINE_INTERLEAVED;
    line.chunks = 5;
    registered(s);
    FAILS(dtrain_strategy_create(world, s->params, 9, &desc, &s->strategy), DTRAIN_ERROR_ARGUMENT,
          "8 units, which leave a stage of 10 (2 ranks x 5 chunks) empty");
    line.chunks = 0;
    line.kind = s->at.rank == 2 ? DTRAIN_PIPELINE_ZB_H1 : DTRAIN_PIPELINE_INTERLEAVED;
    registered(s);
    FAILS(dtrain_strategy_create(world, s->params, 9, &desc, &s->strategy), DTRAIN_ERROR_MISMATCH,
          "rank 2 has pipeline.kind 3, the others have pipeline.kind 2");
    line.kind = 99;
    registered(s);
    CHECK(dtrain_strategy_create(world, s->params, 9, &desc, &s->strategy) != DTRAIN_OK);
    line.kind = DTRAIN_PIPELINE_1F1B;
    for (uint32_t kind = DTRAIN_STRATEGY_SHARD_GRAD_OP; kind <= DTRAIN_STRATEGY_HYBRID_SHARD;
         kind++) {
        desc.kind = kind;
        registered(s);
        FAILS(dtrain_strategy_create(world, s->params, 9, &desc, &s->strategy),
              DTRAIN_ERROR_UNSUPPORTED, "use DTRAIN_STRATEGY_DDP or DTRAIN_STRATEGY_ZERO1");
    }
    desc.kind = DTRAIN_STRATEGY_DDP;
    topk.kind = DTRAIN_COMPRESSION_TOPK;
    desc.compression = &topk;
    registered(s);
    FAILS(dtrain_strategy_create(world, s->params, 9, &desc, &s->strategy),
          DTRAIN_ERROR_UNSUPPORTED, "\"p0\" is tied between stages");
    rank_close(s);
    free(s);
    return 0;
}
static void test_refused(void) { ranks_run(4, DTRAIN_LAUNCH_THREADS, refused_rank, NULL); }

/* A mark of another stage's parameter is an error; a gradient that one stage lacks is one on all ranks, which go on;
 * an infinity on one stage is one in the norm of all. */
static int verdicts_rank(dtrain_world *world, void *user)
{
    rank_of *s = (rank_of *)calloc(1, sizeof *s);
    dtrain_mesh_desc mesh;
    dtrain_strategy_desc desc;
    float norm, scale;
    if (!s) return 1;
    (void)user;
    s->world = world;
    s->c = plain(1, 2, 2, DTRAIN_STRATEGY_ZERO1, DTRAIN_PIPELINE_1F1B);
    memset(&mesh, 0, sizeof mesh);
    memset(&desc, 0, sizeof desc);
    mesh.pipeline = 2;
    RANKS_TRY(dtrain_mesh_create(world, &mesh, &s->mesh));
    dtrain_mesh_query(s->mesh, &s->at);
    registered(s);
    desc.kind = s->c.kind;
    desc.mesh = s->mesh;
    desc.missing_gradient = DTRAIN_MISSING_GRADIENT_ERROR;
    RANKS_TRY(dtrain_strategy_create(world, s->params, 9, &desc, &s->strategy));
    FAILS(dtrain_strategy_ready(s->strategy, s->at.pipeline_rank ? 1 : 6), DTRAIN_ERROR_USAGE,
          "belongs to a stage of another rank");
    for (int step = 0; step < 2; step++) {
        for (int i = 0; i < 9; i++) {
            dtrain_param *p = &s->params[i];
            if (p->state.remote || (step == 0 && s->at.rank == 3 && i == 5)) continue;
            for (int64_t k = 0; k < p->count; k++) p->grad[k] = 1;
            if (step == 1 && s->at.rank == 1 && i == 2) p->grad[3] = INFINITY;
            RANKS_TRY(dtrain_strategy_ready(s->strategy, (size_t)i));
        }
        const dtrain_result result = dtrain_strategy_finish(s->strategy);
        if (step) CHECK(result == DTRAIN_OK);
        else
            CHECK_MSG(result == DTRAIN_ERROR_USAGE && strstr(dtrain_last_error(), "\"p5\""),
                      "rank %d: %s", s->at.rank, dtrain_last_error());
    }
    RANKS_TRY(dtrain_grad_norm(s->strategy, NULL, 1, &norm, &scale));
    CHECK_MSG(!isfinite(norm), "rank %d: the norm is %g", s->at.rank, (double)norm);
    rank_close(s);
    free(s);
    return 0;
}
static void test_verdicts(void) { ranks_run(4, DTRAIN_LAUNCH_THREADS, verdicts_rank, NULL); }

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (argc > 2 && strcmp(argv[1], "--seed") == 0)
        return !run_seed(strtoull(argv[2], NULL, 10), true);
    RUN(test_layouts);
    RUN(test_auto);
    RUN(test_bytes_of_step);
    RUN(test_refused);
    RUN(test_verdicts);
    RUN(test_random_programs);
    return test_summary();
}
