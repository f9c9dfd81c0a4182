/* test_ddp.c: registration and buckets, DDP. The model is a small tied autoencoder with its
 * own backward; one rank on the whole batch is the oracle. */
#include "test.h"
#include "dtrain.h"
#include "device_table.h"
#include "ranks.h"

/* ---- The model: y = s W^T tanh(W x + b1) + b2 + f, loss = |y - x|^2 / 2 + 0.0005 x0^2 |big|^2 ---- */

enum { IN = 6, HID = 5, BIG = 4100, MOST_STEPS = 6 };
enum { ENC, B1, TINY, SIGMA, DEC, BIGP, B2, FIXED, PARAMS };
enum { VALUES = IN * HID + HID + 2 + BIG + IN + IN };

typedef struct model {
    dtrain_param p[PARAMS];
    float values[VALUES], grads[VALUES];
    float g[PARAMS][BIG]; /* of one micro-batch */
} model;

typedef struct config {
    int ranks, batch, steps, accumulation;
    uint32_t mode, optimizer;
    bool no_overlap, shuffle, owned;
    int copying; /* 0 nobody, 1 everybody, 2 odd ranks */
    size_t bucket;
} config;

typedef struct outcome {
    float losses[MOST_STEPS], values[VALUES];
    uint64_t hash;
} outcome;

typedef struct run {
    config settings;
    outcome *out; /* shared, rank 0 writes */
} run;

static float noise(uint64_t stream, uint64_t index)
{
    return (float)(ranks_mix(stream * 1000003u + index) >> 40) / 8388608.0f - 1.0f;
}

/* Host values differ from rank to rank: creation must bring rank 0's everywhere. */
static void model_init(model *m, const config *c, int rank)
{
    static const char *const names[PARAMS] = {"enc", "b1",  "tiny", "sigma",
                                              "dec", "big", "b2",   "fixed"};
    static const int64_t shapes[PARAMS][2] = {{HID, IN}, {HID, 0},  {1, 0},  {1, 0},
                                              {IN, HID}, {41, 100}, {IN, 0}, {IN, 0}};
    bool copy = c->copying == 1 || (c->copying == 2 && rank % 2);
    int i, at = 0;
    memset(m, 0, sizeof *m);
    for (i = 0; i < VALUES; i++) m->values[i] = 0.3f * noise(77, (uint64_t)(i + 1000000 * rank));
    for (i = 0; i < PARAMS; i++) {
        int64_t count = shapes[i][0] * (shapes[i][1] ? shapes[i][1] : 1);
        m->p[i] = ranks_param(names[i], c->owned ? NULL : m->values + at,
                              copy ? m->grads + at : NULL, shapes[i][0], shapes[i][1]);
        m->p[i].unit = (uint32_t)i / 3;
        m->p[i].init = DTRAIN_INIT_NORMAL;
        m->p[i].init_scale = 0.2f;
        if (i == DEC) m->p[i].value = m->p[i].grad = NULL;
        if (i != DEC) at += (int)count;
    }
    m->p[DEC].alias_of = &m->p[ENC];
    m->p[FIXED].flags = DTRAIN_PARAM_FROZEN;
    m->p[FIXED].grad = NULL;
    m->p[BIGP].flags = DTRAIN_PARAM_NO_DECAY;
}

static void sample(uint64_t index, float x[IN])
{
    int i;
    for (i = 0; i < IN; i++) x[i] = noise(5, index * IN + (uint64_t)i);
}

/* Adds one sample's gradient, times factor, to m->g; returns its loss. */
static double model_sample(model *m, uint64_t index, float factor)
{
    const float *w = m->p[ENC].value, *big = m->p[BIGP].value, s = *m->p[SIGMA].value;
    float x[IN], h[HID], d[IN], dh[HID], squares = 0;
    double loss = 0;
    int i, j;
    sample(index, x);
    for (j = 0; j < HID; j++) {
        float sum = m->p[B1].value[j];
        for (i = 0; i < IN; i++) sum += w[j * IN + i] * x[i];
        h[j] = tanhf(sum);
        dh[j] = 0;
    }
    for (i = 0; i < IN; i++) {
        float sum = 0;
        for (j = 0; j < HID; j++) sum += w[j * IN + i] * h[j];
        d[i] = s * sum + m->p[B2].value[i] + m->p[FIXED].value[i] - x[i];
        loss += 0.5 * (double)(d[i] * d[i]);
        m->g[SIGMA][0] += factor * d[i] * sum;
        m->g[B2][i] += factor * d[i];
        for (j = 0; j < HID; j++) {
            m->g[DEC][j * IN + i] += factor * d[i] * s * h[j];
            dh[j] += d[i] * s * w[j * IN + i];
        }
    }
    for (i = 0; i < BIG; i++) {
        squares += big[i] * big[i];
        m->g[BIGP][i] += factor * 0.001f * x[0] * x[0] * big[i];
    }
    for (j = 0; j < HID; j++) {
        float dz = dh[j] * (1 - h[j] * h[j]);
        m->g[B1][j] += factor * dz;
        for (i = 0; i < IN; i++) m->g[ENC][j * IN + i] += factor * dz * x[i];
    }
    return loss + 0.0005 * (double)(x[0] * x[0] * squares);
}

/* Writes a gradient where the strategy wants it: added to what this step already holds, or over it. */
static void emit(model *m, int index)
{
    const dtrain_param *p = &m->p[index], *storage = p->state.storage;
    int64_t i;
    for (i = 0; i < p->count; i++)
        storage->grad[i] =
            storage->state.grad_written ? storage->grad[i] + m->g[index][i] : m->g[index][i];
}

/* The order in which backward marks parameters: reverse, or any that keeps a tied pair's writes apart. */
static void ready_order(int *order, bool shuffle, uint64_t seed)
{
    int i, count = 0;
    for (i = PARAMS - 1; i >= 0; i--)
        if (i != FIXED) order[count++] = i;
    for (i = count - 1; i > 0 && shuffle; i--) {
        int k = (int)ranks_random(&seed, (uint64_t)i + 1), swap = order[i];
        order[i] = order[k];
        order[k] = swap;
    }
}

static dtrain_result backward(model *m, dtrain_strategy *ddp, bool shuffle, uint64_t seed)
{
    int order[PARAMS], i;
    ready_order(order, shuffle, seed);
    for (i = 0; i < PARAMS - 1; i++) {
        dtrain_result result;
        emit(m, order[i]);
        result = dtrain_strategy_ready(ddp, (size_t)order[i]);
        if (result != DTRAIN_OK) return result;
    }
    return DTRAIN_OK;
}

/* One step over this rank's samples; the mean loss over ranks. */
static dtrain_result train_step(dtrain_world *world, model *m, dtrain_strategy *ddp,
                                const config *c, int step, float *loss)
{
    int ranks = dtrain_world_size(world), rank = dtrain_world_rank(world), micro, k;
    int share = c->batch / ranks / c->accumulation;
    double sum = 0;
    dtrain_comm_info before, after;
    for (micro = 0; micro < c->accumulation; micro++) {
        bool last = micro == c->accumulation - 1;
        int first = (step * ranks + rank) * share * c->accumulation + micro * share;
        TRY(dtrain_strategy_accumulate(ddp, !last));
        memset(m->g, 0, sizeof m->g);
        for (k = 0; k < share; k++)
            sum += model_sample(m, (uint64_t)(first + k), 1.0f / (float)(share * c->accumulation));
        dtrain_comm_query(dtrain_world_comm(world), &before);
        TRY(backward(m, ddp, c->shuffle, (uint64_t)(step * 100 + rank)));
        dtrain_comm_query(dtrain_world_comm(world), &after);
        CHECK(last || after.operation_count == before.operation_count);
        TRY(dtrain_strategy_finish(ddp));
    }
    *loss = (float)(sum / (share * c->accumulation));
    return dtrain_all_reduce(dtrain_world_comm(world), loss, loss, 1, DTRAIN_DTYPE_F32,
                             DTRAIN_REDUCE_MEAN, NULL);
}

static void report(outcome *out, const model *m)
{
    int i, at = 0;
    for (i = 0; i < PARAMS; i++) {
        if (i == DEC) continue;
        if (m->p[i].count)
            memcpy(out->values + at, m->p[i].value, (size_t)m->p[i].count * sizeof(float));
        at += (int)m->p[i].count;
    }
}

static dtrain_strategy_desc ddp_desc(const config *c)
{
    dtrain_strategy_desc desc = {0};
    desc.no_overlap = c->no_overlap;
    desc.bucket_bytes = c->bucket;
    desc.init_seed = 11;
    return desc;
}

static int train_main(dtrain_world *world, void *user)
{
    run *r = (run *)user;
    const config *c = &r->settings;
    dtrain_strategy_desc desc = ddp_desc(c);
    dtrain_optimizer_desc hyper = dtrain_optimizer_defaults(c->optimizer);
    dtrain_strategy *ddp = NULL;
    dtrain_optimizer *optimizer = NULL;
    int step, rank = dtrain_world_rank(world);
    float loss;
    uint64_t hash;
    model *m = (model *)malloc(sizeof *m);
    if (c->optimizer != DTRAIN_OPTIMIZER_ADAMW) hyper.momentum = 0.9f;
    hyper.weight_decay = 0.05f;
    model_init(m, c, rank);
    RANKS_TRY(dtrain_strategy_create(world, m->p, PARAMS, &desc, &ddp));
    RANKS_TRY(dtrain_optimizer_create(world, ddp, &hyper, &optimizer));
    for (step = 0; step < c->steps; step++) {
        RANKS_TRY(train_step(world, m, ddp, c, step, &loss));
        RANKS_TRY(dtrain_optimizer_step(optimizer, 0.05f, 1.0f));
        RANKS_TRY(dtrain_strategy_verify(ddp, &hash));
        if (rank == 0) r->out->losses[step] = loss;
    }
    if (rank == 0) {
        report(r->out, m);
        r->out->hash = hash;
    }
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(ddp);
    CHECK(m->p[DEC].value == NULL &&
          m->p[ENC].grad == (c->copying == 1 || (c->copying == 2 && rank % 2) ? m->grads : NULL));
    free(m);
    return 0;
}

static config usual(int ranks)
{
    config c;
    memset(&c, 0, sizeof c);
    c.ranks = ranks;
    c.batch = 96;
    c.steps = 4;
    c.accumulation = 1;
    c.mode = DTRAIN_LAUNCH_THREADS;
    c.optimizer = DTRAIN_OPTIMIZER_SGD;
    return c;
}

static outcome train(const config *c)
{
    run r;
    outcome result;
    r.settings = *c;
    r.out = (outcome *)ranks_shared(sizeof *r.out);
    memset(r.out, 0xff, sizeof *r.out);
    ranks_run(c->ranks, c->mode, train_main, &r);
    result = *r.out;
    munmap(r.out, sizeof *r.out);
    return result;
}

static void check_close(const outcome *a, const outcome *b, int steps, double tolerance,
                        const char *what)
{
    double worst = 0;
    int i;
    for (i = 0; i < steps; i++)
        CHECK_MSG(test_close((double)a->losses[i], (double)b->losses[i], tolerance),
                  "%s: loss of step %d is %.9g, expected %.9g", what, i, (double)a->losses[i],
                  (double)b->losses[i]);
    for (i = 0; i < VALUES; i++) {
        double off = fabs((double)a->values[i] - (double)b->values[i]);
        if (!(off <= worst)) worst = off;
    }
    CHECK_MSG(worst <= tolerance, "%s: parameters are up to %g apart", what, worst);
}

static void check_same(const outcome *a, const outcome *b, int steps, const char *what)
{
    CHECK_MSG(memcmp(a->losses, b->losses, (size_t)steps * sizeof(float)) == 0, "%s: other losses",
              what);
    CHECK_MSG(memcmp(a->values, b->values, sizeof a->values) == 0, "%s: other parameters", what);
    CHECK_MSG(a->hash == b->hash, "%s: other hash", what);
}

/* ---- Same mathematics, same bits ---- */

/* The same training without dtrain: one loop over the whole batch, SGD written out. */
static outcome train_plain(const config *c)
{
    outcome out;
    model *m = (model *)malloc(sizeof *m);
    float *momentum = (float *)calloc(PARAMS * BIG, sizeof *momentum);
    int step, i, k;
    memset(&out, 0, sizeof out);
    model_init(m, c, 0);
    m->p[DEC].value = m->p[ENC].value;
    for (i = 0; i < PARAMS; i++)
        m->p[i].count = m->p[i].shape[0] * (m->p[i].shape[1] ? m->p[i].shape[1] : 1);
    for (step = 0; step < c->steps; step++) {
        double sum = 0;
        memset(m->g, 0, sizeof m->g);
        for (k = 0; k < c->batch; k++)
            sum += model_sample(m, (uint64_t)(step * c->batch + k), 1.0f / (float)c->batch);
        out.losses[step] = (float)(sum / c->batch);
        for (i = 0; i < PARAMS; i++)
            for (k = 0; k < m->p[i].count && i != FIXED && i != DEC; k++) {
                float *v = &momentum[i * BIG + k];
                *v = 0.9f * *v + m->g[i][k] + (i == ENC ? m->g[DEC][k] : 0);
                if (i == ENC) *v += 0.05f * m->p[i].value[k]; /* only it is decayed */
                m->p[i].value[k] -= 0.05f * *v;
            }
    }
    report(&out, m);
    free(momentum);
    free(m);
    return out;
}

static void test_one_rank_equals_none(void)
{
    config c = usual(1);
    outcome one, none = train_plain(&c);
    one = train(&c);
    check_close(&one, &none, c.steps, 2e-6, "one rank and a plain loop");
    c.copying = 1;
    c.accumulation = 3;
    one = train(&c);
    check_close(&one, &none, c.steps, 2e-6, "one rank, accumulating, and a plain loop");
}

static void test_ranks_equal_one(void)
{
    int ranks;
    for (ranks = 2; ranks <= 8; ranks++) {
        config c = usual(ranks);
        outcome one, many;
        char what[32];
        if (96 % ranks) c.batch = ranks * 12;
        many = train(&c);
        c.ranks = 1;
        one = train(&c);
        CHECK(one.losses[3] < one.losses[0]); /* it learns, so a gradient that is lost would show */
        snprintf(what, sizeof what, "%d threads", ranks);
        check_close(&many, &one, c.steps, 2e-6, what);
    }
}

static void test_processes(void)
{
    int ranks;
    for (ranks = 1; ranks <= 8; ranks = ranks == 1 ? 3 : ranks + 5) {
        config c = usual(ranks);
        outcome threads = train(&c), processes;
        c.mode = DTRAIN_LAUNCH_PROCESSES;
        processes = train(&c);
        check_same(&processes, &threads, c.steps, "processes and threads");
    }
}

static void test_64_ranks(void)
{
    config c = usual(64);
    outcome one, many;
    c.batch = 64;
    c.steps = 2;
    many = train(&c);
    c.ranks = 1;
    one = train(&c);
    check_close(&many, &one, c.steps, 2e-6, "64 ranks");
}

static void bits_with(uint32_t optimizer)
{
    static const size_t buckets[] = {64, 1024, 20000, (size_t)25 << 20};
    config c = usual(4);
    outcome base, other;
    size_t i;
    c.optimizer = optimizer;
    c.accumulation = 2;
    base = train(&c);
    other = train(&c);
    check_same(&other, &base, c.steps, "run to run");
    for (i = 0; i < sizeof buckets / sizeof buckets[0]; i++) {
        config b = c;
        b.bucket = buckets[i];
        b.no_overlap = i % 2;
        other = train(&b);
        check_same(&other, &base, c.steps, "bucket size");
    }
    for (i = 1; i < 3; i++) {
        config b = c;
        b.copying = (int)i;
        b.bucket = 1024;
        other = train(&b);
        check_same(&other, &base, c.steps, i == 1 ? "copying" : "copying on odd ranks");
        b.no_overlap = true;
        other = train(&b);
        check_same(&other, &base, c.steps, "copying without overlap");
    }
}

static void test_same_bits(void) { bits_with(DTRAIN_OPTIMIZER_SGD); }
static void test_same_bits_adamw(void) { bits_with(DTRAIN_OPTIMIZER_ADAMW); }

/* Ready orders that differ from rank to rank: launch order is bucket order. The tied pair's two
 * contributions are added in another order, so the oracle shuffles the same way with one big bucket. */
static void test_ready_order(void)
{
    config c = usual(5);
    outcome base, other;
    c.batch = 60;
    c.shuffle = true;
    base = train(&c);
    c.bucket = 64;
    other = train(&c);
    check_same(&other, &base, c.steps, "shuffled, tiny buckets");
    c.copying = 1;
    other = train(&c);
    check_same(&other, &base, c.steps, "shuffled, copying");
    c.shuffle = false;
    other = train(&c);
    check_close(&other, &base, c.steps, 2e-6, "shuffled or not");
}

static void test_accumulation(void)
{
    int ranks, copying;
    for (ranks = 1; ranks <= 3; ranks++) {
        config c = usual(ranks);
        outcome base = train(&c), other;
        c.accumulation = 4;
        for (copying = 0; copying < 2; copying++) {
            c.copying = copying;
            other = train(&c);
            check_close(&other, &base, c.steps, 2e-6, "accumulation");
        }
    }
}

/* ---- Values ---- */

static int owned_main(dtrain_world *world, void *user)
{
    config c = usual(0);
    dtrain_strategy *ddp;
    dtrain_strategy_desc desc = ddp_desc(&c);
    dtrain_strategy_info info;
    dtrain_param *p;
    uint64_t hash, again;
    int64_t i, aligned = 0;
    model *m = (model *)malloc(sizeof *m);
    float *expected = (float *)user;
    c.owned = true;
    model_init(m, &c, dtrain_world_rank(world));
    m->p[B1].init = DTRAIN_INIT_UNIFORM;
    m->p[B2].init = DTRAIN_INIT_CONSTANT;
    m->p[SIGMA].init = DTRAIN_INIT_ZERO;
    m->p[SIGMA].count = 1;
    m->p[SIGMA].shape[0] = 0;
    RANKS_TRY(dtrain_strategy_create(world, m->p, PARAMS, &desc, &ddp));
    for (i = 0, p = &m->p[ENC]; i < p->count; i++)
        CHECK(p->value[i] == 0.2f * dtrain_random_normal(11, ENC, (uint64_t)i));
    for (i = 0, p = &m->p[BIGP]; i < p->count; i++)
        CHECK(p->value[i] == 0.2f * dtrain_random_normal(11, BIGP, (uint64_t)i));
    for (i = 0, p = &m->p[B1]; i < p->count; i++)
        CHECK(p->value[i] >= -0.2f && p->value[i] < 0.2f &&
              p->value[i] != p->value[(i + 1) % p->count]);
    for (i = 0, p = &m->p[B2]; i < p->count; i++) CHECK(p->value[i] == 0.2f);
    CHECK(*m->p[SIGMA].value == 0 && m->p[SIGMA].shape[0] == 1);
    CHECK(m->p[DEC].value == m->p[ENC].value && m->p[DEC].grad == m->p[ENC].grad);
    CHECK(m->p[DEC].state.storage == &m->p[ENC] && m->p[ENC].state.storage == &m->p[ENC] &&
          m->p[B2].state.index == B2);
    CHECK(m->p[FIXED].grad == NULL && m->p[FIXED].value != NULL && m->p[TINY].value != NULL);
    for (i = 0; i < PARAMS; i++)
        aligned |= (int64_t)((uintptr_t)m->p[i].value | (uintptr_t)m->p[i].grad) & 63;
    CHECK(aligned == 0);
    RANKS_TRY(dtrain_strategy_verify(ddp, &hash));
    RANKS_TRY(dtrain_strategy_verify(ddp, &again));
    CHECK(hash == again && hash != 0);
    dtrain_strategy_query(ddp, &info);
    CHECK(info.total_elements == VALUES && info.trainable_elements == VALUES - IN);
    CHECK(info.value_bytes == VALUES * 4 && info.param_count == PARAMS && info.sync_count == 0);
    CHECK(info.grad_bytes == info.bucket_bytes &&
          info.bucket_bytes == 4 * (32 + 16 + 16 + 16 + 4112 + 16));
    if (dtrain_world_rank(world) == 0) memcpy(expected, m->p[BIGP].value, BIG * sizeof(float));
    dtrain_strategy_destroy(ddp);
    for (i = 0; i < PARAMS; i++) CHECK(!m->p[i].value && !m->p[i].grad);
    free(m);
    return 0;
}

static void test_owned_values(void)
{
    float *a = (float *)ranks_shared(2 * BIG * sizeof(float)), *b = a + BIG;
    ranks_run(3, DTRAIN_LAUNCH_THREADS, owned_main, a);
    ranks_run(1, DTRAIN_LAUNCH_PROCESSES, owned_main, b);
    CHECK(memcmp(a, b, BIG * sizeof(float)) == 0); /* the same for any number of ranks */
}

static int broadcast_main(dtrain_world *world, void *user)
{
    config c = usual(0);
    dtrain_strategy *ddp;
    int i;
    model *m = (model *)malloc(sizeof *m), *zero = (model *)malloc(sizeof *m);
    (void)user;
    model_init(m, &c, dtrain_world_rank(world));
    model_init(zero, &c, 0);
    RANKS_TRY(dtrain_strategy_create(world, m->p, PARAMS, NULL, &ddp));
    CHECK(memcmp(m->values, zero->values, sizeof m->values) == 0);
    RANKS_TRY(dtrain_strategy_verify(ddp, NULL));
    for (i = 0; i < PARAMS; i++) CHECK(i == DEC || m->p[i].value != NULL);
    dtrain_strategy_destroy(ddp);
    free(m);
    free(zero);
    return 0;
}

static void test_rank_0_values(void)
{
    ranks_run(5, DTRAIN_LAUNCH_THREADS, broadcast_main, NULL);
    ranks_run(2, DTRAIN_LAUNCH_PROCESSES, broadcast_main, NULL);
}

/* One bit of one rank, anywhere: rank and parameter are named on every rank. */
static int drift_main(dtrain_world *world, void *user)
{
    static const struct {
        int rank, param, element;
        uint32_t bit;
        int second;
    } cases[] = {{2, BIGP, 4099, 0, -1},
                 {0, ENC, 3, 31, -1},
                 {1, SIGMA, 0, 12, -1},
                 {2, FIXED, 5, 22, -1},
                 {2, DEC, 0, 1, -1},
                 {1, BIGP, 1, 31, 3}}; /* two signs: a plain product would cancel them */
    config c = usual(0);
    dtrain_strategy *ddp;
    size_t i;
    model *m = (model *)malloc(sizeof *m);
    (void)user;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char name[64], rank[32];
        int index = cases[i].param == DEC ? ENC : cases[i].param; /* the storage's name */
        float *value;
        uint32_t bits;
        model_init(m, &c, 0);
        RANKS_TRY(dtrain_strategy_create(world, m->p, PARAMS, NULL, &ddp));
        value = m->p[cases[i].param].value + cases[i].element;
        if (dtrain_world_rank(world) == cases[i].rank) {
            memcpy(&bits, value, 4);
            bits ^= 1u << cases[i].bit;
            memcpy(value, &bits, 4);
            if (cases[i].second >= 0) m->p[cases[i].param].value[cases[i].second] *= -1;
        }
        CHECK(dtrain_strategy_verify(ddp, NULL) == DTRAIN_ERROR_MISMATCH);
        snprintf(name, sizeof name, "\"%s\"", m->p[index].name);
        snprintf(rank, sizeof rank, "on rank %d", cases[i].rank);
        CHECK_MSG(strstr(dtrain_last_error(), name) && strstr(dtrain_last_error(), rank),
                  "%s, %s: %s", name, rank, dtrain_last_error());
        dtrain_strategy_destroy(ddp);
    }
    free(m);
    return 0;
}

static void test_verify_finds_a_bit(void) { ranks_run(3, DTRAIN_LAUNCH_THREADS, drift_main, NULL); }

/* ---- Ranks that disagree ---- */

typedef struct mismatch {
    const char *expected; /* in everybody's sentence */
    int what;
} mismatch;

#define LONG_NAME                                                                                 \
    "a.name.that.goes.on.and.on.a.name.that.goes.on.and.on.a.name.that.goes.on.and.on.a.name."    \
    "that.goes.on.and.on.a.name.that.goes.on.and.on.a.name.that.goes.on.and.on.a.name.that.goes." \
    "on"

static void differ(model *m, dtrain_strategy_desc *desc, size_t *count, int what)
{
    switch (what) {
    case 0: m->p[B1].shape[0] = m->p[B1].count = HID - 1; break;
    case 1: m->p[B2].name = "b3"; break;
    case 2: m->p[BIGP].shape[0] = 100, m->p[BIGP].shape[1] = 41; break;
    case 3: {
        dtrain_param swap = m->p[B2];
        m->p[B2] = m->p[BIGP];
        m->p[BIGP] = swap;
        break;
    }
    case 4: m->p[SIGMA].flags = DTRAIN_PARAM_FROZEN; break;
    case 5: m->p[B1].unit = 9; break;
    case 6: *count = PARAMS - 1; break;
    case 7: m->p[DEC].alias_of = NULL, m->p[DEC].value = m->g[0]; break;
    case 8: m->p[BIGP].value = NULL; break;
    case 9: desc->bucket_bytes = 4096; break;
    case 11: m->p[B2].name = LONG_NAME "y"; break;
    default: m->p[TINY].count = 7, m->p[TINY].shape[0] = 7; break;
    }
}

static int mismatch_main(dtrain_world *world, void *user)
{
    static const mismatch cases[] = {{"parameter 1 (name \"b1\") differs", 0},
                                     {"name \"b3\"", 1},
                                     {"(name \"big\") differs: ", 2},
                                     {"parameter 5 differs", 3},
                                     {"(name \"sigma\") differs: ", 4},
                                     {"unit 9", 5},
                                     {"only 7 of them", 6},
                                     {"(name \"dec\") differs: ", 7},
                                     {"values from \"the library\"", 8},
                                     {"bucket_bytes 4096", 9},
                                     {"(name \"tiny\") differs: ", 10},
                                     {"parameter 6 differs", 11}};
    config c = usual(0);
    size_t i;
    int odd = *(int *)user;
    model *m = (model *)malloc(sizeof *m);
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dtrain_strategy_desc desc = {0};
        dtrain_strategy *ddp = (dtrain_strategy *)m;
        char wrong[32];
        size_t count = PARAMS;
        model_init(m, &c, 0);
        if (cases[i].what == 11) m->p[B2].name = LONG_NAME "x";
        if (dtrain_world_rank(world) == odd) differ(m, &desc, &count, cases[i].what);
        CHECK(dtrain_strategy_create(world, m->p, count, &desc, &ddp) == DTRAIN_ERROR_MISMATCH);
        CHECK(ddp == NULL);
        snprintf(wrong, sizeof wrong, "rank %d has", odd);
        CHECK_MSG(strstr(dtrain_last_error(), cases[i].expected) &&
                      strstr(dtrain_last_error(), wrong) &&
                      strstr(dtrain_last_error(), ", the others have"),
                  "case %d: %s", (int)i, dtrain_last_error());
        if (cases[i].what == 11) /* of both names the end is shown, where they differ */
            CHECK_MSG(strstr(dtrain_last_error(), "onx\"") && strstr(dtrain_last_error(), "ony\""),
                      "%s", dtrain_last_error());
    }
    free(m);
    m = (model *)malloc(sizeof *m); /* the communicator is as good as before */
    {
        dtrain_strategy *ddp;
        model_init(m, &c, 0);
        RANKS_TRY(dtrain_strategy_create(world, m->p, PARAMS, NULL, &ddp));
        dtrain_strategy_destroy(ddp);
    }
    free(m);
    return 0;
}

static void test_registration_differs(void)
{
    int odd;
    for (odd = 0; odd < 4; odd += 3) ranks_run(4, DTRAIN_LAUNCH_THREADS, mismatch_main, &odd);
}

/* A bad argument on one rank is an error on all, and nobody waits. */
static int one_bad_main(dtrain_world *world, void *user)
{
    config c = usual(0);
    dtrain_strategy_desc desc = {0};
    dtrain_strategy *ddp;
    double start = dtrain_seconds();
    bool bad = dtrain_world_rank(world) == 1;
    model *m = (model *)malloc(sizeof *m);
    (void)user;
    model_init(m, &c, 0);
    if (bad) m->p[B1].name = "enc";
    CHECK(dtrain_strategy_create(world, m->p, PARAMS, NULL, &ddp) == DTRAIN_ERROR_ARGUMENT);
    CHECK_MSG(strstr(dtrain_last_error(), "parameter 1 (\"enc\"): parameter 0 has the same name"),
              "%s", dtrain_last_error());
    CHECK(bad || strstr(dtrain_last_error(), "rank 1 failed"));
    model_init(m, &c, 0);
    CHECK(dtrain_strategy_create(world, m->p, PARAMS, NULL, bad ? NULL : &ddp) ==
          DTRAIN_ERROR_ARGUMENT);
    desc.kind = bad ? 77 : DTRAIN_STRATEGY_DDP;
    CHECK(dtrain_strategy_create(world, m->p, PARAMS, &desc, &ddp) == DTRAIN_ERROR_ARGUMENT);
    CHECK_MSG(strstr(dtrain_last_error(), "kind is 77; expected a dtrain_strategy_kind"), "%s",
              dtrain_last_error());
    CHECK(dtrain_seconds() - start < RANKS_SOON);
    free(m);
    return 0;
}

static void test_one_rank_is_wrong(void)
{
    ranks_run(3, DTRAIN_LAUNCH_THREADS, one_bad_main, NULL);
}

static int arguments_main(dtrain_world *world, void *user)
{
    static float memory[64];
    dtrain_strategy_desc desc = {0};
    dtrain_strategy *ddp;
    dtrain_param p[3];
    int i;
    (void)user;
    for (i = 0; i < 18; i++) {
        size_t count = 2;
        p[0] = ranks_param("a", memory, NULL, 2, 3);
        p[1] = ranks_param("b", memory + 8, NULL, 4, 0);
        p[2] = ranks_param("c", memory + 16, NULL, 6, 0);
        switch (i) {
        case 0: p[1].name = NULL; break;
        case 1: p[1].name = ""; break;
        case 2: p[1].name = "a"; break;
        case 3: p[1].count = -1; break;
        case 4: p[1].count = 5; break;
        case 5: p[1].shape[0] = -4; break;
        case 6: p[1].shape[2] = 4; break;
        case 7: p[1].shape[0] = p[1].shape[1] = p[1].shape[2] = INT64_MAX / 2; break;
        case 8: p[1].shape[0] = INT64_MAX / 3; break;
        case 9: p[1].alias_of = &p[1]; break;
        case 10: p[1].alias_of = &p[2]; break;
        case 11: p[1].alias_of = (dtrain_param *)(void *)((char *)p + 8); break;
        case 12: p[1].alias_of = &p[0]; break; /* 4 elements, not 6 */
        case 13:
            p[1] = ranks_param("b", memory + 8, NULL, 6, 0), p[1].alias_of = &p[0];
            break; /* own value */
        case 14: p[1].flags = 8; break;
        case 15: p[1].init = 4; break;
        case 16: p[1].count = p[1].shape[0] = 0; break;
        default: desc.missing_gradient = 3; break;
        }
        CHECK_MSG(dtrain_strategy_create(world, p, count, &desc, &ddp) == DTRAIN_ERROR_ARGUMENT &&
                      !ddp,
                  "case %d passes", i);
        CHECK_MSG(i >= 17 || strstr(dtrain_last_error(), "parameter 1 "), "case %d: %s", i,
                  dtrain_last_error());
    }
    CHECK(dtrain_strategy_create(NULL, p, 1, NULL, &ddp) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_strategy_create(world, NULL, 1, NULL, &ddp) == DTRAIN_ERROR_ARGUMENT);
    RANKS_TRY(dtrain_strategy_create(world, NULL, 0, NULL, &ddp)); /* a model without parameters */
    RANKS_TRY(dtrain_strategy_finish(ddp));
    RANKS_TRY(dtrain_strategy_verify(ddp, NULL));
    dtrain_strategy_destroy(ddp);
    dtrain_strategy_destroy(NULL);
    CHECK(dtrain_strategy_ready(NULL, 0) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_strategy_finish(NULL) == DTRAIN_ERROR_ARGUMENT);
    return 0;
}

static void test_arguments(void) { ranks_run(1, DTRAIN_LAUNCH_THREADS, arguments_main, NULL); }

/* An alias of an alias ends at the first entry; one without a shape takes it from there. */
static int chain_main(dtrain_world *world, void *user)
{
    float value[6] = {1, 2, 3, 4, 5, 6};
    dtrain_param p[3];
    dtrain_strategy *ddp;
    const dtrain_shard *shards;
    size_t count;
    (void)user;
    p[0] = ranks_param("a", value, NULL, 2, 3);
    p[1] = ranks_param("b", NULL, NULL, 6, 0);
    p[2] = ranks_param("c", NULL, NULL, 0, 0);
    p[1].alias_of = &p[0];
    p[2].alias_of = &p[1];
    p[2].flags = DTRAIN_PARAM_FROZEN; /* takes part in forward, gives no gradient */
    RANKS_TRY(dtrain_strategy_create(world, p, 3, NULL, &ddp));
    CHECK(p[2].state.storage == &p[0] && p[2].value == value && p[2].count == 6 &&
          p[2].shape[1] == 3);
    RANKS_TRY(dtrain_strategy_shards(ddp, &shards, &count));
    CHECK(count == 1 && shards[0].param == &p[0] && shards[0].count == 6 &&
          shards[0].value == value && shards[0].grad == p[0].grad && shards[0].offset == 0);
    CHECK(dtrain_strategy_ready(ddp, 2) == DTRAIN_ERROR_USAGE);
    p[0].grad[0] = (float)dtrain_world_rank(world);
    RANKS_TRY(dtrain_strategy_ready(ddp, 1));
    RANKS_TRY(dtrain_strategy_ready(ddp, 0));
    RANKS_TRY(dtrain_strategy_finish(ddp));
    CHECK(p[0].grad[0] == 0.5f);
    dtrain_strategy_destroy(ddp);
    return 0;
}

static void test_alias_chain(void) { ranks_run(2, DTRAIN_LAUNCH_THREADS, chain_main, NULL); }

/* ---- A backward that is not as it should be ---- */

typedef struct captured {
    int warnings; /* atomic */
    char text[1024];
} captured;

static void capture(void *user, dtrain_log_level level, int rank, const char *text)
{
    captured *log = (captured *)user;
    if (level != DTRAIN_LOG_WARNING || rank != 1) return;
    __atomic_fetch_add(&log->warnings, 1, __ATOMIC_ACQ_REL);
    snprintf(log->text, sizeof log->text, "%s", text);
}

enum { MANY = 12 };

/* Names that have their first 61 bytes in common. */
#define MANY_NAMES(number)                                                                    \
    "base_model.model.model.layers.10.block_sparse_moe.experts.7.w" number ".lora_A.default." \
    "weight"

/* Twelve parameters of four elements; marks those below `marked` with gradient rank + 1. */
static void many_params(dtrain_param *p, char names[][96], float *values, float *grads,
                        bool copying)
{
    int i;
    for (i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof names[i], MANY_NAMES("%d"), i);
        p[i] = ranks_param(names[i], values + 4 * i, copying ? grads + 4 * i : NULL, 4, 0);
    }
}

static dtrain_result partial_backward(dtrain_param *p, dtrain_strategy *ddp, int rank, int marked)
{
    int i, k;
    for (i = 0; i < marked; i++) {
        for (k = 0; k < 4; k++) p[i].grad[k] = (float)(rank + 1);
        TRY(dtrain_strategy_ready(ddp, (size_t)i));
    }
    return DTRAIN_OK;
}

static int missing_zero_main(dtrain_world *world, void *user)
{
    float values[4 * MANY] = {0}, grads[4 * MANY];
    char names[MANY][96];
    dtrain_param p[MANY];
    dtrain_strategy_desc desc = {0};
    dtrain_strategy *ddp;
    captured *log = (captured *)user;
    int rank = dtrain_world_rank(world), i, copying;
    desc.bucket_bytes = 128;
    for (copying = 0; copying < 2; copying++) {
        int before = __atomic_load_n(&log->warnings, __ATOMIC_ACQUIRE);
        many_params(p, names, values, grads, copying);
        for (i = 0; i < 4 * MANY; i++) grads[i] = 99;
        RANKS_TRY(dtrain_strategy_create(world, p, MANY, &desc, &ddp));
        for (i = 0; i < 4 * MANY; i++) p[i / 4].grad[i % 4] = 99; /* what an earlier step left */
        for (i = 0; i < 3; i++) {
            RANKS_TRY(partial_backward(p, ddp, rank, rank == 1 ? 2 : MANY)); /* rank 1 lacks ten */
            RANKS_TRY(dtrain_strategy_finish(ddp));
            CHECK(p[0].grad[0] == 2 && p[1].grad[3] == 2 && !p[0].state.grad_written);
            CHECK_CLOSE(p[2].grad[0], 4.0f / 3, 1e-6); /* (1 + 0 + 3) / 3 */
            CHECK_CLOSE(p[MANY - 1].grad[3], 4.0f / 3, 1e-6);
        }
        if (rank == 1) {
            CHECK_MSG(__atomic_load_n(&log->warnings, __ATOMIC_ACQUIRE) == before + 1,
                      "%d warnings", __atomic_load_n(&log->warnings, __ATOMIC_ACQUIRE) - before);
            CHECK_MSG(strstr(log->text, MANY_NAMES("2") "\", ") &&
                          strstr(log->text, MANY_NAMES("9") "\" and 2 more"),
                      "%s", log->text);
            CHECK(!strstr(log->text, "w1.lora") && !strstr(log->text, "w10.lora"));
        }
        RANKS_TRY(partial_backward(p, ddp, rank, rank == 1 ? 1 : MANY)); /* p1 is new */
        RANKS_TRY(dtrain_strategy_finish(ddp));
        if (rank == 1)
            CHECK_MSG(__atomic_load_n(&log->warnings, __ATOMIC_ACQUIRE) == before + 2 &&
                          strstr(log->text, MANY_NAMES("1")) && !strstr(log->text, "w2.lora"),
                      "%s", log->text);
        RANKS_TRY(dtrain_strategy_finish(ddp)); /* no backward at all: everything is zero */
        for (i = 0; i < MANY; i++) CHECK(p[i].grad[0] == 0);
        dtrain_strategy_destroy(ddp);
    }
    return 0;
}

static void test_missing_is_zero(void)
{
    dtrain_launch_desc desc = ranks_desc(3, DTRAIN_LAUNCH_THREADS);
    captured *log = (captured *)ranks_shared(sizeof *log);
    desc.options.log = capture;
    desc.options.log_user = log;
    desc.options.log_level = DTRAIN_LOG_INFO;
    CHECK_MSG(ranks_launch(&desc, missing_zero_main, log, NULL) == DTRAIN_OK, "%s",
              dtrain_last_error());
}

static int missing_error_main(dtrain_world *world, void *user)
{
    float values[4 * MANY] = {0}, grads[4 * MANY];
    char names[MANY][96];
    dtrain_param p[MANY];
    dtrain_strategy_desc desc = {0};
    dtrain_strategy *ddp;
    int rank = dtrain_world_rank(world), step;
    (void)user;
    desc.missing_gradient = DTRAIN_MISSING_GRADIENT_ERROR;
    desc.bucket_bytes = 64;
    many_params(p, names, values, grads, rank != 1);
    RANKS_TRY(dtrain_strategy_create(world, p, MANY, &desc, &ddp));
    for (step = 0; step < 4; step++) {
        bool bad = step % 2 == 0;
        dtrain_result result;
        RANKS_TRY(partial_backward(p, ddp, rank, bad && rank == 1 ? MANY - 1 : MANY));
        result = dtrain_strategy_finish(ddp);
        CHECK_MSG(result == (bad ? DTRAIN_ERROR_USAGE : DTRAIN_OK), "step %d: %s", step,
                  dtrain_result_text(result));
        CHECK_MSG(!bad || strstr(dtrain_last_error(), "\"" MANY_NAMES("11") "\""), "%s",
                  dtrain_last_error());
        if (!bad) CHECK(p[MANY - 1].grad[2] == 2 && p[0].grad[0] == 2);
    }
    /* seen in an earlier micro-batch of the step is enough */
    RANKS_TRY(dtrain_strategy_accumulate(ddp, true));
    RANKS_TRY(partial_backward(p, ddp, rank, MANY));
    RANKS_TRY(dtrain_strategy_finish(ddp));
    RANKS_TRY(dtrain_strategy_accumulate(ddp, false));
    RANKS_TRY(partial_backward(p, ddp, rank, rank == 0 ? 3 : MANY));
    RANKS_TRY(dtrain_strategy_finish(ddp));
    CHECK(p[MANY - 1].grad[0] == 2);
    dtrain_strategy_destroy(ddp);
    return 0;
}

static void test_missing_is_an_error(void)
{
    ranks_run(3, DTRAIN_LAUNCH_THREADS, missing_error_main, NULL);
    ranks_run(3, DTRAIN_LAUNCH_PROCESSES, missing_error_main, NULL);
}

static int misuse_main(dtrain_world *world, void *user)
{
    config c = usual(0);
    dtrain_strategy *ddp;
    dtrain_strategy_info info;
    model *m = (model *)malloc(sizeof *m);
    (void)user;
    model_init(m, &c, 0);
    RANKS_TRY(dtrain_strategy_create(world, m->p, PARAMS, NULL, &ddp));
    RANKS_TRY(dtrain_strategy_gather(ddp, 0, DTRAIN_PASS_BACKWARD));
    RANKS_TRY(dtrain_strategy_ready(ddp, B2));
    CHECK(m->p[B2].state.grad_written);
    CHECK(dtrain_strategy_ready(ddp, B2) == DTRAIN_ERROR_USAGE);
    CHECK_MSG(strstr(dtrain_last_error(), "\"b2\"") && strstr(dtrain_last_error(), "twice"), "%s",
              dtrain_last_error());
    CHECK(dtrain_strategy_ready(ddp, PARAMS) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_strategy_ready(ddp, FIXED) == DTRAIN_ERROR_USAGE);
    CHECK_MSG(strstr(dtrain_last_error(), "\"fixed\""), "%s", dtrain_last_error());
    CHECK(dtrain_strategy_accumulate(ddp, true) == DTRAIN_ERROR_USAGE);
    RANKS_TRY(dtrain_strategy_accumulate(ddp, false));
    RANKS_TRY(dtrain_strategy_release(ddp, 0));
    RANKS_TRY(dtrain_strategy_finish(ddp));
    RANKS_TRY(dtrain_strategy_ready(ddp, B2)); /* a new backward */
    RANKS_TRY(dtrain_strategy_finish(ddp));
    dtrain_strategy_query(ddp, &info);
    CHECK(info.comm == dtrain_world_comm(world));
    dtrain_strategy_query(NULL, &info);
    CHECK(info.comm == NULL);
    dtrain_strategy_destroy(ddp);
    free(m);
    return 0;
}

static void test_misuse(void) { ranks_run(2, DTRAIN_LAUNCH_THREADS, misuse_main, NULL); }

/* What the wire carries: the padded buckets once per step, by the ring formula, and behind them the
 * weight and which gradients there are; nothing alone. */
static int bytes_main(dtrain_world *world, void *user)
{
    config c = usual(0);
    dtrain_comm_info before, after;
    dtrain_strategy_info info;
    dtrain_strategy *ddp;
    float loss;
    int n = dtrain_world_size(world);
    model *m = (model *)malloc(sizeof *m);
    (void)user;
    model_init(m, &c, 0);
    c.bucket = 1024;
    {
        dtrain_strategy_desc desc = ddp_desc(&c);
        RANKS_TRY(dtrain_strategy_create(world, m->p, PARAMS, &desc, &ddp));
    }
    dtrain_comm_query(dtrain_world_comm(world), &before);
    c.accumulation = 3;
    RANKS_TRY(train_step(world, m, ddp, &c, 0, &loss));
    dtrain_comm_query(dtrain_world_comm(world), &after);
    dtrain_strategy_query(ddp, &info);
    CHECK(info.bucket_count == 3 && info.sync_count == 1);
    CHECK(after.operation_count - before.operation_count ==
          (n > 1 ? 4u : 0u) + 1); /* and the loss */
    CHECK(after.payload_bytes - before.payload_bytes ==
          (n > 1 ? info.bucket_bytes + 4 * (1 + PARAMS) : 0) + 4);
    CHECK_CLOSE((double)(after.wire_bytes - before.wire_bytes),
                2.0 * (n - 1) / n * (double)(info.bucket_bytes + 4 * (1 + PARAMS) + 4), 0.01);
    CHECK(info.traffic.wire_bytes == after.wire_bytes);
    CHECK(after.staged_bytes == before.staged_bytes); /* buckets are read where they lie */
    dtrain_strategy_destroy(ddp);
    free(m);
    return 0;
}

static void test_bytes(void)
{
    ranks_run(4, DTRAIN_LAUNCH_THREADS, bytes_main, NULL);
    ranks_run(1, DTRAIN_LAUNCH_THREADS, bytes_main, NULL);
}

/* Launched before finish, when there is overlap; not before, without. */
static int overlap_main(dtrain_world *world, void *user)
{
    config c = usual(0);
    dtrain_strategy *ddp;
    dtrain_comm_info before, between;
    int overlap;
    model *m = (model *)malloc(sizeof *m);
    (void)user;
    for (overlap = 0; overlap < 2; overlap++) {
        dtrain_strategy_desc desc;
        c.no_overlap = !overlap;
        c.bucket = 64;
        desc = ddp_desc(&c);
        model_init(m, &c, 0);
        RANKS_TRY(dtrain_strategy_create(world, m->p, PARAMS, &desc, &ddp));
        dtrain_comm_query(dtrain_world_comm(world), &before);
        RANKS_TRY(dtrain_strategy_ready(ddp, BIGP)); /* second bucket: waits for the first */
        dtrain_comm_query(dtrain_world_comm(world), &between);
        CHECK(between.operation_count == before.operation_count);
        RANKS_TRY(dtrain_strategy_ready(ddp, B2));
        dtrain_comm_query(dtrain_world_comm(world), &between);
        CHECK(between.operation_count == before.operation_count + (overlap ? 2u : 0u));
        RANKS_TRY(dtrain_strategy_ready(ddp, DEC)); /* the tied pair waits for its other half */
        RANKS_TRY(dtrain_strategy_ready(ddp, SIGMA));
        RANKS_TRY(dtrain_strategy_ready(ddp, TINY));
        RANKS_TRY(dtrain_strategy_ready(ddp, B1));
        dtrain_comm_query(dtrain_world_comm(world), &between);
        CHECK(between.operation_count == before.operation_count + (overlap ? 5u : 0u));
        RANKS_TRY(dtrain_strategy_ready(ddp, ENC));
        dtrain_comm_query(dtrain_world_comm(world), &between);
        CHECK(between.operation_count == before.operation_count + (overlap ? 6u : 0u));
        RANKS_TRY(dtrain_strategy_finish(ddp));
        dtrain_strategy_destroy(ddp);
    }
    free(m);
    return 0;
}

static void test_overlap(void) { ranks_run(2, DTRAIN_LAUNCH_THREADS, overlap_main, NULL); }

/* ---- Failures ---- */

static int failed_main(dtrain_world *world, void *user)
{
    config c = usual(0);
    dtrain_strategy_desc desc = {0};
    dtrain_strategy *ddp;
    dtrain_result first;
    char text[1024];
    float x = 0;
    model *m = (model *)malloc(sizeof *m);
    (void)user;
    desc.no_overlap = true; /* finish is the first to start anything */
    model_init(m, &c, 0);
    RANKS_TRY(dtrain_strategy_create(world, m->p, PARAMS, &desc, &ddp));
    RANKS_TRY(backward(m, ddp, false, 0));
    if (dtrain_world_rank(world) == 1) /* a collective that the others do not make */
        dtrain_all_reduce(dtrain_world_comm(world), &x, &x, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                          NULL);
    else dtrain_barrier(dtrain_world_comm(world));
    first = dtrain_strategy_finish(ddp);
    CHECK_MSG(first == DTRAIN_ERROR_MISMATCH, "%s", dtrain_result_text(first));
    snprintf(text, sizeof text, "%s", dtrain_last_error());
    dtrain_fail(DTRAIN_ERROR_ARGUMENT, "another one");
    CHECK(dtrain_strategy_ready(ddp, 0) == first && strcmp(dtrain_last_error(), text) == 0);
    CHECK(dtrain_strategy_finish(ddp) == first && dtrain_strategy_verify(ddp, NULL) == first);
    CHECK(dtrain_strategy_gather(ddp, 0, DTRAIN_PASS_BACKWARD) == first &&
          dtrain_strategy_accumulate(ddp, true) == first);
    CHECK_MSG(strcmp(dtrain_last_error(), text) == 0, "%s, not %s", dtrain_last_error(), text);
    dtrain_strategy_destroy(ddp);
    free(m);
    return 0;
}

static void test_after_a_failure(void)
{
    ranks_run(3, DTRAIN_LAUNCH_THREADS, failed_main, NULL);
    ranks_run(3, DTRAIN_LAUNCH_PROCESSES, failed_main, NULL);
}

/* A rank that gives up in the middle of a backward is heard of at once, without a deadline. */
static int abandon_main(dtrain_world *world, void *user)
{
    config c = usual(0);
    dtrain_strategy *ddp;
    dtrain_strategy_desc desc = {0};
    double start = dtrain_seconds();
    model *m = (model *)malloc(sizeof *m);
    int32_t *done = (int32_t *)user;
    desc.bucket_bytes = 64;
    model_init(m, &c, 0);
    RANKS_TRY(dtrain_strategy_create(world, m->p, PARAMS, &desc, &ddp));
    if (dtrain_world_rank(world) == 1) {
        ranks_await(done, dtrain_world_size(world) - 1);
        RANKS_TRY(dtrain_strategy_ready(ddp, B2));
        RANKS_TRY(dtrain_strategy_ready(ddp, BIGP));
        RANKS_TRY(dtrain_strategy_ready(ddp, SIGMA));
    } else {
        CHECK(backward(m, ddp, false, 0) == DTRAIN_OK);
        ranks_count(done);
        CHECK(dtrain_strategy_finish(ddp) == DTRAIN_ERROR_PEER);
        CHECK_MSG(strstr(dtrain_last_error(), "rank 1") &&
                      strstr(dtrain_last_error(), "between ready and finish"),
                  "%s", dtrain_last_error());
    }
    dtrain_strategy_destroy(ddp);
    CHECK(dtrain_seconds() - start < RANKS_SOON);
    free(m);
    return 0;
}

/* A device whose memory the host may not touch: values go through staging, with the same bits. */
static void test_staged_values(void)
{
    static dtrain_device_ops ops; /* set before the ranks start */
    dtrain_launch_desc desc = ranks_desc(2, DTRAIN_LAUNCH_THREADS);
    float *a = (float *)ranks_shared(2 * BIG * sizeof(float)), *b = a + BIG;
    ranks_run(2, DTRAIN_LAUNCH_THREADS, owned_main, a);
    ops = *device_table("cpu");
    ops.host_memory = false;
    desc.device_ops = &ops;
    CHECK_MSG(ranks_launch(&desc, owned_main, b, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
    CHECK(memcmp(a, b, BIG * sizeof(float)) == 0);
}

static dtrain_result broken_copy(dtrain_device *device, void *to, const void *from, size_t bytes,
                                 dtrain_copy_kind kind)
{
    if (bytes == IN * HID * sizeof(float))
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "the copy engine is on fire");
    return device_table("cpu")->copy(device, to, from, bytes, kind);
}

/* Rank 1 copies, and its device breaks while it does; the others are told, not left to the deadline. */
static int broken_main(dtrain_world *world, void *user)
{
    config c = usual(0);
    dtrain_strategy *ddp;
    dtrain_result result;
    double start = dtrain_seconds();
    bool mine = dtrain_world_rank(world) == 1;
    model *m = (model *)malloc(sizeof *m);
    int32_t *met = (int32_t *)user;
    c.copying = 2;
    model_init(m, &c, dtrain_world_rank(world));
    RANKS_TRY(dtrain_strategy_create(world, m->p, PARAMS, NULL, &ddp));
    RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
    if (mine) ranks_await(met, dtrain_world_size(world) - 1);
    else ranks_count(met); /* out of the barrier */
    result = backward(m, ddp, false, 0);
    if (result == DTRAIN_OK) result = dtrain_strategy_finish(ddp);
    CHECK_MSG(result == (mine ? DTRAIN_ERROR_SYSTEM : DTRAIN_ERROR_PEER), "%s",
              dtrain_result_text(result));
    CHECK_MSG(strstr(dtrain_last_error(), "on fire"), "%s", dtrain_last_error());
    CHECK(dtrain_strategy_finish(ddp) == result && strstr(dtrain_last_error(), "on fire"));
    CHECK(dtrain_seconds() - start < RANKS_SOON);
    dtrain_strategy_destroy(ddp);
    free(m);
    return 0;
}

static void test_broken_device(void)
{
    static dtrain_device_ops ops;
    dtrain_launch_desc desc = ranks_desc(3, DTRAIN_LAUNCH_THREADS);
    ops = *device_table("cpu");
    ops.copy = broken_copy;
    desc.device_ops = &ops;
    CHECK_MSG(ranks_launch(&desc, broken_main, ranks_shared(64), NULL) == DTRAIN_OK, "%s",
              dtrain_last_error());
}

/* No checks inside: most runs fail, and must only end and give everything back. */
static int tracked_main(dtrain_world *world, void *user)
{
    config c = usual(0);
    dtrain_strategy *ddp = NULL;
    dtrain_optimizer *optimizer = NULL;
    dtrain_optimizer_desc hyper = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_strategy_desc desc = ddp_desc(&c);
    float loss;
    int step, bad = 1;
    model *m = (model *)malloc(sizeof *m);
    (void)user;
    desc.bucket_bytes = 64;
    c.batch = 6;
    c.owned = true;
    model_init(m, &c, 0);
    if (dtrain_strategy_create(world, m->p, PARAMS, &desc, &ddp) == DTRAIN_OK &&
        dtrain_optimizer_create(world, ddp, &hyper, &optimizer) == DTRAIN_OK) {
        bad = 0;
        for (step = 0; step < 2 && !bad; step++)
            bad = train_step(world, m, ddp, &c, step, &loss) != DTRAIN_OK ||
                  dtrain_optimizer_step(optimizer, 0.01f, 1) != DTRAIN_OK;
    }
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(ddp);
    free(m);
    return bad;
}

static void test_allocation_failures(void)
{
    dtrain_launch_desc desc = ranks_desc(3, DTRAIN_LAUNCH_THREADS);
    counted_memory t;
    int n;
    desc.options.log_level = DTRAIN_LOG_ERROR;
    for (n = 1; n < 400; n++) {
        double start = dtrain_seconds();
        dtrain_result result;
        memset(&t, 0, sizeof t);
        t.fail_at = n;
        desc.options.allocator = counted_allocator(&t);
        result = dtrain_launch(&desc, tracked_main, NULL, NULL);
        CHECK_MSG(t.live == 0 && t.live_bytes == 0, "call %d fails: %ld blocks, %ld bytes leak", n,
                  t.live, t.live_bytes);
        CHECK_MSG(dtrain_seconds() - start < RANKS_SOON, "call %d fails: %.1f s", n,
                  dtrain_seconds() - start);
        CHECK_MSG((result == DTRAIN_OK) == (t.calls < n), "call %d of %ld fails: %s", n, t.calls,
                  dtrain_result_text(result));
        if (t.calls < n) break;
    }
    CHECK_MSG(n > 20 && n < 400, "%d allocations", n);
}

/* From the second step on nothing is allocated and nothing moves. */
static int steady_main(dtrain_world *world, void *user)
{
    counted_memory *t = (counted_memory *)user;
    config c = usual(0);
    dtrain_strategy *ddp;
    dtrain_optimizer *optimizer;
    dtrain_optimizer_desc hyper = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_strategy_desc desc = ddp_desc(&c);
    float loss, norm, scale;
    int step;
    long calls = 0;
    model *m = (model *)malloc(sizeof *m);
    model_init(m, &c, 0);
    desc.bucket_bytes = 64;
    RANKS_TRY(dtrain_strategy_create(world, m->p, PARAMS, &desc, &ddp));
    RANKS_TRY(dtrain_optimizer_create(world, ddp, &hyper, &optimizer));
    for (step = 0; step < 5; step++) {
        RANKS_TRY(train_step(world, m, ddp, &c, step, &loss));
        RANKS_TRY(dtrain_grad_norm(ddp, NULL, 1, &norm, &scale));
        RANKS_TRY(dtrain_optimizer_step(optimizer, 0.01f, scale));
        RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
        if (step == 0) calls = t->calls;
        RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
    }
    CHECK_MSG(t->calls == calls, "%ld allocations after the first step", t->calls - calls);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(ddp);
    free(m);
    return 0;
}

static void test_steady_state(void)
{
    dtrain_launch_desc desc = ranks_desc(3, DTRAIN_LAUNCH_THREADS);
    counted_memory t;
    memset(&t, 0, sizeof t);
    desc.options.allocator = counted_allocator(&t);
    CHECK_MSG(ranks_launch(&desc, steady_main, &t, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
    CHECK(t.live == 0 && t.wrong == 0);
}

static void test_abandoned_backward(void)
{
    ranks_run(3, DTRAIN_LAUNCH_THREADS, abandon_main, ranks_shared(64));
}

/* ---- Subgroups, the plan ---- */

static int group_main(dtrain_world *world, void *user)
{
    float value = (float)dtrain_world_rank(world), grad = value;
    int color = dtrain_world_rank(world) % 2;
    dtrain_param p = ranks_param("w", &value, &grad, 1, 0);
    dtrain_strategy_desc desc = {0};
    dtrain_strategy *ddp;
    (void)user;
    RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), color, 0, &desc.comm));
    RANKS_TRY(dtrain_strategy_create(world, &p, 1, &desc, &ddp));
    CHECK(value == (float)color);
    grad = (float)dtrain_world_rank(world);
    RANKS_TRY(dtrain_strategy_ready(ddp, 0));
    RANKS_TRY(dtrain_strategy_finish(ddp));
    CHECK(grad == (color ? 2.0f : 2.0f)); /* (1 + 3) / 2, (0 + 2 + 4) / 3 */
    if (dtrain_world_rank(world) == 4) value = 9;
    if (color) RANKS_TRY(dtrain_strategy_verify(ddp, NULL));
    else
        CHECK(dtrain_strategy_verify(ddp, NULL) == DTRAIN_ERROR_MISMATCH &&
              strstr(dtrain_last_error(), "on rank 4 "));
    dtrain_strategy_destroy(ddp);
    dtrain_comm_destroy(desc.comm);
    return 0;
}

static void test_subgroups(void) { ranks_run(5, DTRAIN_LAUNCH_THREADS, group_main, NULL); }

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_arguments);
    RUN(test_alias_chain);
    RUN(test_owned_values);
    RUN(test_rank_0_values);
    RUN(test_verify_finds_a_bit);
    RUN(test_registration_differs);
    RUN(test_one_rank_is_wrong);
    RUN(test_one_rank_equals_none);
    RUN(test_ranks_equal_one);
    RUN(test_processes);
    RUN(test_64_ranks);
    RUN(test_same_bits);
    RUN(test_same_bits_adamw);
    RUN(test_ready_order);
    RUN(test_accumulation);
    RUN(test_missing_is_zero);
    RUN(test_missing_is_an_error);
    RUN(test_misuse);
    RUN(test_bytes);
    RUN(test_overlap);
    RUN(test_after_a_failure);
    RUN(test_abandoned_backward);
    RUN(test_staged_values);
    RUN(test_broken_device);
    RUN(test_allocation_failures);
    RUN(test_steady_state);
    RUN(test_subgroups);
    return test_summary();
}
