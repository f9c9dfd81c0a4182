/* What ranks may do differently, and calls at unusual moments: one small program for each defect that was found
 * there. tests/fuzz/test_programs.c looks for their relatives. */
#include "test.h"

#include "dtrain.h"
#include "ranks.h"

enum { ALL_KINDS = 6, COUNT = 40 };

static dtrain_param one_param(const char *name, uint32_t unit)
{
    dtrain_param p = ranks_param(name, NULL, NULL, COUNT, 0);
    p.unit = unit;
    return p;
}

static void fill(dtrain_param *p, float value)
{
    for (int64_t i = 0; i < p->count; i++)
        p->grad[i] = p->state.grad_written ? p->grad[i] + value : value;
}

/* The gradient that this rank's share of params[index] shows; NaN where elements differ. */
static float shown(dtrain_strategy *s, const dtrain_param *p)
{
    const dtrain_shard *shards;
    size_t count;
    float value = -1; /* no share: ranks with one say it */
    if (dtrain_strategy_shards(s, &shards, &count) != DTRAIN_OK) return NAN;
    for (size_t k = 0; k < count; k++)
        for (int64_t i = 0; shards[k].param == p && i < shards[k].count; i++) {
            if (i && shards[k].grad[i] != value) return NAN;
            value = shards[k].grad[i];
        }
    return value;
}
#define SHOWS(p, wanted)                                                              \
    do {                                                                              \
        const float found = shown(s, p);                                              \
        CHECK_MSG(found == -1 || found == (float)(wanted),                            \
                  "%s, rank %d: \"%s\" is %g, expected %g", c->name, rank, (p)->name, \
                  (double)found, (double)(wanted));                                   \
    } while (0)

/* A program of two units, run by two ranks under every kind that takes the desc. */
typedef struct scene scene;
typedef int (*act)(const scene *c, dtrain_world *world, dtrain_strategy *s, dtrain_param *p,
                   int rank);
struct scene {
    const char *name;
    act play;
    dtrain_strategy_desc desc;
    bool host_grads[2]; /* rank r owns the memory of its gradients */
};

static int scene_rank(dtrain_world *world, void *user)
{
    const scene *c = (const scene *)user;
    const int rank = dtrain_world_rank(world);
    static float own[2][3][COUNT];
    dtrain_param p[4] = {one_param("a", 0), one_param("b", 0), one_param("c", 1),
                         one_param("d", 1)};
    dtrain_strategy *s;
    p[3].alias_of = &p[2];
    for (int i = 0; i < 3 && c->host_grads[rank]; i++) p[i].grad = own[rank][i];
    RANKS_TRY(dtrain_strategy_create(world, p, 4, &c->desc, &s));
    const int result = c->play(c, world, s, p, rank);
    dtrain_strategy_destroy(s);
    return result;
}

static void run_scene(scene c)
{
    static const char *const kinds[] = {"default",    "ddp",   "zero1",       "shard_grad_op",
                                        "full_shard", "zero3", "hybrid_shard"};
    char name[96];
    snprintf(name, sizeof name, "%s, %s", c.name, kinds[c.desc.kind]);
    c.name = name;
    ranks_run(2, DTRAIN_LAUNCH_THREADS, scene_rank, &c);
}

/* Plays it under all kinds from `first` on. */
static void run_scenes(const char *name, act play, uint32_t first)
{
    scene c;
    memset(&c, 0, sizeof c);
    c.name = name;
    c.play = play;
    for (c.desc.kind = first; c.desc.kind <= ALL_KINDS; c.desc.kind++) {
        c.desc.node_size = c.desc.kind == DTRAIN_STRATEGY_HYBRID_SHARD ? 2 : 0;
        run_scene(c);
    }
}

/* ---- One rank lacks a gradient -------------------------------------------------------------------- */

/* A backward over both units; the rank marks those of its bits. b and c lie in both units' buckets. */
static dtrain_result backward(dtrain_strategy *s, dtrain_param *p, const float *grads,
                              uint32_t bits)
{
    for (uint32_t u = 2; u-- > 0;) {
        TRY(dtrain_strategy_gather(s, u, DTRAIN_PASS_BACKWARD));
        for (size_t i = 4; i-- > 0;) {
            if (p[i].unit != u || !(bits >> i & 1)) continue;
            fill(&p[i], grads[i]);
            TRY(dtrain_strategy_ready(s, i));
        }
        TRY(dtrain_strategy_release(s, u));
    }
    return dtrain_strategy_finish(s);
}
static dtrain_result forward(dtrain_strategy *s)
{
    for (uint32_t u = 0; u < 2; u++) {
        TRY(dtrain_strategy_gather(s, u, DTRAIN_PASS_FORWARD));
        TRY(dtrain_strategy_release(s, u));
    }
    return DTRAIN_OK;
}

/* Rank 1 lacks `a` in the first of two micro-batches, and in the second what the first has is added to. */
static int lacks_in_one_micro_batch(const scene *c, dtrain_world *world, dtrain_strategy *s,
                                    dtrain_param *p, int rank)
{
    const float first[4] = {4, 1, 1, 1}, second[4] = {rank ? 6.0f : 2.0f, 1, 1, 1};
    (void)world;
    RANKS_TRY(dtrain_strategy_accumulate(s, true));
    RANKS_TRY(forward(s));
    RANKS_TRY(backward(s, p, first, rank ? 14 : 15));
    RANKS_TRY(dtrain_strategy_accumulate(s, false));
    RANKS_TRY(forward(s));
    RANKS_TRY(backward(s, p, second, 15));
    SHOWS(&p[0], 6); /* (4 + 2 + 6) / 2 */
    SHOWS(&p[1], 2);
    SHOWS(&p[2], 4); /* alias and target, twice each */
    RANKS_TRY(dtrain_strategy_publish(s));
    return 0;
}

/* Rank 1 has no gradient of the last unit, then none at all, then calls finish alone. */
static int lacks_units(const scene *c, dtrain_world *world, dtrain_strategy *s, dtrain_param *p,
                       int rank)
{
    const float ones[4] = {1, 1, 1, 1};
    (void)world;
    for (int step = 0; step < 3; step++) {
        RANKS_TRY(forward(s));
        if (rank == 0 || step < 2) RANKS_TRY(backward(s, p, ones, rank == 0 ? 15 : step ? 0 : 3));
        else RANKS_TRY(dtrain_strategy_finish(s));
        SHOWS(&p[0], step ? 0.5 : 1);
        SHOWS(&p[2], 1); /* rank 0's alias and target, halved */
        RANKS_TRY(dtrain_strategy_publish(s));
    }
    return 0;
}

static void test_lacking(void)
{
    scene c;
    run_scenes("a micro-batch", lacks_in_one_micro_batch, DTRAIN_STRATEGY_DDP);
    run_scenes("units", lacks_units, DTRAIN_STRATEGY_DDP);
    for (int variant = 1; variant < 4; variant++) /* late; the memory of one rank; nodes of one */
        for (uint32_t kind = DTRAIN_STRATEGY_SHARD_GRAD_OP; kind <= ALL_KINDS; kind++)
            for (int which = 0; which < 2; which++) {
                memset(&c, 0, sizeof c);
                c.name = "variants";
                c.desc.kind = kind;
                c.desc.accumulation = variant == 1 ? DTRAIN_ACCUMULATION_LAST : 0;
                c.host_grads[1] = variant == 2;
                c.desc.node_size = kind == DTRAIN_STRATEGY_HYBRID_SHARD ? variant == 3 ? 1 : 2 : 0;
                c.play = which ? lacks_units : lacks_in_one_micro_batch;
                run_scene(c);
            }
}

/* ---- Moments -------------------------------------------------------------------------------------- */

/* Values of a unit that is gathered stay right while others are read through its slot. */
static int reads_while_gathered(const scene *c, dtrain_world *world, dtrain_strategy *s,
                                dtrain_param *p, int rank)
{
    float before[4][COUNT], now[COUNT];
    const float ones[4] = {1, 1, 1, 1};
    (void)world;
    for (size_t i = 0; i < 4; i++) RANKS_TRY(dtrain_strategy_read(s, i, before[i]));
    RANKS_TRY(dtrain_strategy_gather(s, 0, DTRAIN_PASS_FORWARD));
    RANKS_TRY(dtrain_strategy_verify(s, NULL));
    CHECK_MSG(p[0].value && memcmp(p[0].value, before[0], sizeof now) == 0, "%s, rank %d: unit 0",
              c->name, rank);
    RANKS_TRY(dtrain_strategy_release(s, 0));
    RANKS_TRY(dtrain_strategy_gather(s, 1, DTRAIN_PASS_FORWARD));
    for (size_t i = 0; i < 4; i++) {
        RANKS_TRY(dtrain_strategy_read(s, i, now));
        CHECK_MSG(memcmp(now, before[i], sizeof now) == 0, "%s, rank %d: read of %s", c->name, rank,
                  p[i].name);
        CHECK_MSG(p[2].value && memcmp(p[2].value, before[2], sizeof now) == 0,
                  "%s, rank %d: unit 1", c->name, rank);
    }
    RANKS_TRY(backward(s, p, ones, 15)); /* without a release between, as a tape does */
    SHOWS(&p[0], 1);
    return 0;
}

/* Marks and settings out of place are refused by name, also while gradients only add up, and change nothing. */
static int misplaced_calls(const scene *c, dtrain_world *world, dtrain_strategy *s, dtrain_param *p,
                           int rank)
{
    const bool sharded = c->desc.kind >= DTRAIN_STRATEGY_SHARD_GRAD_OP;
    float now[COUNT];
    (void)world;
    RANKS_TRY(dtrain_strategy_accumulate(s, true));
    for (int micro = 0; micro < 2; micro++) {
        RANKS_TRY(forward(s));
        if (sharded)
            CHECK_MSG(dtrain_strategy_ready(s, 1) == DTRAIN_ERROR_USAGE &&
                          strstr(dtrain_last_error(), "DTRAIN_PASS_BACKWARD"),
                      "%s: %s", c->name, dtrain_last_error());
        RANKS_TRY(dtrain_strategy_gather(s, 1, DTRAIN_PASS_BACKWARD));
        fill(&p[2], 1);
        RANKS_TRY(dtrain_strategy_ready(s, 2));
        RANKS_TRY(
            dtrain_strategy_gather(s, 1, DTRAIN_PASS_BACKWARD)); /* again: the same unit goes on */
        CHECK_MSG(dtrain_strategy_ready(s, 2) == DTRAIN_ERROR_USAGE &&
                      strstr(dtrain_last_error(), "twice"),
                  "%s: %s", c->name, dtrain_last_error());
        CHECK_MSG(dtrain_strategy_accumulate(s, micro == 1) == DTRAIN_ERROR_USAGE, "%s: %s",
                  c->name, dtrain_last_error());
        CHECK_MSG(dtrain_strategy_read(s, 0, now) == DTRAIN_ERROR_USAGE &&
                      dtrain_strategy_verify(s, NULL) == DTRAIN_ERROR_USAGE &&
                      strstr(dtrain_last_error(), "dtrain_strategy_finish"),
                  "%s: %s", c->name, dtrain_last_error());
        CHECK(p[2].state.grad_written && p[3].state.grad_written);
        fill(&p[3], 1);
        if (!sharded || micro == 0) RANKS_TRY(dtrain_strategy_ready(s, 3));
        RANKS_TRY(dtrain_strategy_gather(s, 0, DTRAIN_PASS_BACKWARD));
        if (sharded) {
            const dtrain_result late = dtrain_strategy_gather(s, 1, DTRAIN_PASS_BACKWARD);
            CHECK_MSG(late == DTRAIN_ERROR_USAGE && strstr(dtrain_last_error(), "unit 1"), "%s: %s",
                      c->name, dtrain_last_error());
        }
        if (sharded && micro == 1) /* its bucket has left */
            CHECK_MSG(dtrain_strategy_ready(s, 3) == DTRAIN_ERROR_USAGE &&
                          strstr(dtrain_last_error(), "ends with that of another unit"),
                      "%s: %s", c->name, dtrain_last_error());
        fill(&p[1], 3);
        RANKS_TRY(dtrain_strategy_ready(s, 1));
        RANKS_TRY(dtrain_strategy_finish(s));
        RANKS_TRY(dtrain_strategy_accumulate(s, false));
    }
    SHOWS(&p[1], 6);
    SHOWS(&p[2], 4);
    return 0;
}

#define REFUSED(call)                                                    \
    CHECK_MSG((call) == DTRAIN_ERROR_USAGE &&                            \
                  strstr(dtrain_last_error(), "dtrain_strategy_finish"), \
              "%s, rank %d: %s: %s", c->name, rank, #call, dtrain_last_error())

/* Calls that belong between steps are refused from the first gather or mark of a backward on, also when its unit
 * has been left without a mark, and until the last micro-batch; they change nothing, and rank 1 has gradients in
 * the first micro-batch only. */
static int calls_between_steps(const scene *c, dtrain_world *world, dtrain_strategy *s,
                               dtrain_param *p, int rank)
{
    const bool sharded = c->desc.kind > DTRAIN_STRATEGY_SHARD_GRAD_OP ||
                         (c->desc.kind == DTRAIN_STRATEGY_SHARD_GRAD_OP &&
                          c->desc.accumulation != DTRAIN_ACCUMULATION_LAST);
    const float ones[4] = {1, 1, 1, 1};
    const dtrain_optimizer_desc sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    const dtrain_shard *shards;
    dtrain_optimizer *optimizer;
    float norm, scale;
    size_t count;
    RANKS_TRY(dtrain_optimizer_create(world, s, &sgd, &optimizer));
    for (int micro = 0; micro < 2; micro++) {
        RANKS_TRY(dtrain_strategy_accumulate(s, !micro));
        RANKS_TRY(forward(s));
        RANKS_TRY(dtrain_strategy_accumulate(s, !!micro)); /* no backward has begun */
        RANKS_TRY(dtrain_strategy_accumulate(s, !micro));
        for (uint32_t u = 2; u-- > 0 && sharded;) {
            RANKS_TRY(dtrain_strategy_gather(s, u, DTRAIN_PASS_BACKWARD));
            REFUSED(dtrain_strategy_accumulate(s, !!micro));
            RANKS_TRY(dtrain_strategy_accumulate(s, !micro)); /* no change */
            if (micro && rank) continue;
            for (size_t i = 4; i-- > 0;)
                if (p[i].unit == u) {
                    fill(&p[i], 1);
                    RANKS_TRY(dtrain_strategy_ready(s, i));
                }
            REFUSED(dtrain_strategy_shards(s, &shards, &count));
            REFUSED(dtrain_strategy_publish(s));
            REFUSED(dtrain_optimizer_step(optimizer, 1, 1));
            REFUSED(dtrain_grad_norm(s, NULL, 1, &norm, &scale));
        }
        if (sharded) RANKS_TRY(dtrain_strategy_finish(s));
        else RANKS_TRY(backward(s, p, ones, micro && rank ? 0 : 15));
        if (micro) break;
        REFUSED(dtrain_strategy_shards(s, &shards, &count));
        REFUSED(dtrain_strategy_publish(s));
        REFUSED(dtrain_optimizer_step(optimizer, 1, 1));
        REFUSED(dtrain_grad_norm(s, NULL, 1, &norm, &scale));
    }
    SHOWS(&p[0], 1.5);
    SHOWS(&p[2], 3); /* alias and target */
    RANKS_TRY(dtrain_optimizer_step(optimizer, 1, 1));
    dtrain_optimizer_destroy(optimizer);
    return 0;
}

/* Between two units of a backward the host makes a collective of its own; rank 1 has no gradients. */
static int own_collectives(const scene *c, dtrain_world *world, dtrain_strategy *s, dtrain_param *p,
                           int rank)
{
    dtrain_comm *own;
    RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), 0, rank, &own));
    RANKS_TRY(forward(s));
    for (uint32_t u = 2; u-- > 0;) {
        float x[1] = {1};
        RANKS_TRY(dtrain_strategy_gather(s, u, DTRAIN_PASS_BACKWARD));
        for (size_t i = 4; rank == 0 && i-- > 0;)
            if (p[i].unit == u) {
                fill(&p[i], 2);
                RANKS_TRY(dtrain_strategy_ready(s, i));
            }
        RANKS_TRY(dtrain_all_reduce(own, x, x, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
        CHECK(x[0] == 2);
    }
    dtrain_comm_destroy(own);
    RANKS_TRY(dtrain_strategy_finish(s));
    SHOWS(&p[0], 1);
    return 0;
}

static void test_moments(void)
{
    run_scenes("read", reads_while_gathered, DTRAIN_STRATEGY_DDP);
    run_scenes("misplaced", misplaced_calls, DTRAIN_STRATEGY_DDP);
    run_scenes("between steps", calls_between_steps, DTRAIN_STRATEGY_DDP);
    for (uint32_t kind = DTRAIN_STRATEGY_SHARD_GRAD_OP; kind <= ALL_KINDS; kind++) {
        scene c;
        memset(&c, 0, sizeof c);
        c.name = "between steps, accumulation last", c.play = calls_between_steps;
        c.desc.kind = kind, c.desc.accumulation = DTRAIN_ACCUMULATION_LAST;
        c.desc.node_size = kind == DTRAIN_STRATEGY_HYBRID_SHARD ? 2 : 0;
        run_scene(c);
    }
    run_scenes("own collectives", own_collectives, DTRAIN_STRATEGY_DDP);
}

/* ---- Activations made again ------------------------------------------------------------------------ */

/* In backward all ranks make the activations of units first to last again before the backward of the last, and
 * rank 1 has stepped over those of `over`. Every gradient is 1 + rank. */
typedef struct redo {
    uint32_t over, first, last;
    bool entered; /* the last is gathered for backward before */
    bool refused; /* more than two units, and it is not */
    uint32_t kind, frozen;
    bool no_overlap;
} redo;
enum { REDO_UNITS = 6 };

static dtrain_result redo_forward(const redo *r, dtrain_strategy *s, const dtrain_param *p,
                                  uint32_t first, uint32_t last)
{
    for (uint32_t u = first; u <= last; u++) {
        TRY(dtrain_strategy_gather(s, u, DTRAIN_PASS_FORWARD));
        CHECK_MSG(p[u].value && p[u].value[0] == (float)(u + 1),
                  "kind %u, over %x, %u to %u: unit %u in forward", r->kind, r->over, r->first,
                  r->last, u);
        TRY(dtrain_strategy_release(s, u));
    }
    return DTRAIN_OK;
}

static dtrain_result redo_backward(const redo *r, dtrain_strategy *s, dtrain_param *p, int rank)
{
    for (uint32_t u = REDO_UNITS; u-- > 0;) {
        if (u == r->last && r->entered) TRY(dtrain_strategy_gather(s, u, DTRAIN_PASS_BACKWARD));
        if (u == r->last) TRY(redo_forward(r, s, p, r->first, u));
        if (rank && r->over >> u & 1) continue;
        TRY(dtrain_strategy_gather(s, u, DTRAIN_PASS_BACKWARD));
        CHECK_MSG(p[u].value && p[u].value[0] == (float)(u + 1),
                  "kind %u, over %x, %u to %u: unit %u in backward", r->kind, r->over, r->first,
                  r->last, u);
        if (!(p[u].flags & DTRAIN_PARAM_FROZEN)) {
            fill(&p[u], (float)(1 + rank));
            TRY(dtrain_strategy_ready(s, u));
        }
        TRY(dtrain_strategy_release(s, u));
    }
    return dtrain_strategy_finish(s);
}

static int redo_rank(dtrain_world *world, void *user)
{
    static const char *const names[REDO_UNITS] = {"a", "b", "c", "d", "e", "f"};
    const redo *r = (const redo *)user;
    const int rank = dtrain_world_rank(world);
    dtrain_param p[REDO_UNITS];
    dtrain_strategy_desc desc;
    dtrain_strategy *s;
    memset(&desc, 0, sizeof desc);
    desc.kind = r->kind;
    desc.node_size = r->kind == DTRAIN_STRATEGY_HYBRID_SHARD ? 2 : 0;
    desc.no_overlap = r->no_overlap;
    for (uint32_t u = 0; u < REDO_UNITS; u++) {
        p[u] = one_param(names[u], u);
        p[u].init = DTRAIN_INIT_CONSTANT, p[u].init_scale = (float)(u + 1);
        if (r->frozen >> u & 1) p[u].flags = DTRAIN_PARAM_FROZEN;
    }
    RANKS_TRY(dtrain_strategy_create(world, p, REDO_UNITS, &desc, &s));
    for (int step = 0; step < 2; step++) {
        RANKS_TRY(redo_forward(r, s, p, 0, REDO_UNITS - 1));
        const dtrain_result result = redo_backward(r, s, p, rank);
        if (r->refused) {
            /* each rank is refused; one that is late may hear first that another was */
            CHECK_MSG(result != DTRAIN_OK && strstr(dtrain_last_error(),
                                                    "gather the last of them for backward before"),
                      "kind %u, rank %d: %s", r->kind, rank, dtrain_last_error());
            break;
        }
        RANKS_TRY(result);
        for (uint32_t u = 0; u < REDO_UNITS; u++) {
            const float found = shown(s, &p[u]);
            CHECK_MSG(found == -1 || found == (r->over >> u & 1 ? 0.5f : 1.5f),
                      "kind %u, over %x, %u to %u, rank %d: gradient of unit %u is %g", r->kind,
                      r->over, r->first, r->last, rank, u, (double)found);
        }
        RANKS_TRY(dtrain_strategy_publish(s));
    }
    dtrain_strategy_destroy(s);
    return 0;
}

static void test_activations_again(void)
{
    static const redo cases[] = {
        /* over, first, last */
        {1 << 3, 2, 2, false, false, 0, 0, false},     {1 << 3, 1, 2, false, false, 0, 0, false},
        {3 << 4, 2, 3, false, false, 0, 0, false},     {1 << 5, 4, 4, false, false, 0, 0, false},
        {1 << 2, 1, 2, false, false, 0, 0, false},     {7 << 3, 2, 2, false, false, 0, 0, false},
        {1 << 1, 0, 0, false, false, 0, 0, false},     {3 << 2, 0, 1, false, false, 0, 0, false},
        {1 << 4, 0, 3, true, false, 0, 0, false},      {3 << 4, 1, 3, true, false, 0, 0, false},
        {1 << 3 | 1 << 5, 1, 3, true, false, 0, 0, 0}, {1 << 4, 1, 3, false, true, 0, 0, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (uint32_t variant = 0; variant < 4; variant++)
            for (uint32_t kind = DTRAIN_STRATEGY_SHARD_GRAD_OP; kind <= ALL_KINDS; kind++) {
                redo r = cases[i];
                r.kind = kind;
                r.frozen = variant & 1 ? r.over : 0;
                r.no_overlap = variant >> 1 & 1;
                ranks_run(2, DTRAIN_LAUNCH_THREADS, redo_rank, &r);
            }
}

/* ---- The first cause ------------------------------------------------------------------------------ */

/* Rank 1 of three fails in the middle of a backward, destroys its strategy and ends last: the others hear what was
 * wrong at first, wherever they are by then, and the launcher names that rank. */
typedef struct downfall {
    int which;
    uint32_t kind;
    int32_t ended;
    char heard[3][1024];
} downfall;
static const char *const causes[] = {"is marked twice in one backward", "rank 99 does not exist",
                                     "sample 17 cannot be read"};

static dtrain_result fail_somehow(dtrain_world *world, dtrain_strategy *s, int which)
{
    float x = 0;
    if (which == 0) return dtrain_strategy_ready(s, 2);
    if (which == 1)
        return dtrain_broadcast(dtrain_world_comm(world), &x, 1, DTRAIN_DTYPE_F32, 99, NULL);
    return dtrain_fail(DTRAIN_ERROR_DATA, "sample 17 cannot be read");
}
static int downfall_rank(dtrain_world *world, void *user)
{
    downfall *d = (downfall *)user;
    const int rank = dtrain_world_rank(world);
    const float ones[4] = {1, 1, 1, 1};
    dtrain_param p[4] = {one_param("a", 0), one_param("b", 0), one_param("c", 1),
                         one_param("d", 1)};
    dtrain_strategy_desc desc;
    dtrain_strategy *s;
    memset(&desc, 0, sizeof desc);
    desc.kind = d->kind;
    desc.node_size = d->kind == DTRAIN_STRATEGY_HYBRID_SHARD ? 3 : 0;
    dtrain_result result = dtrain_strategy_create(world, p, 4, &desc, &s);
    if (result == DTRAIN_OK) result = forward(s);
    if (rank != 1 && result == DTRAIN_OK) result = backward(s, p, ones, 15);
    if (rank == 1) {
        RANKS_TRY(result);
        RANKS_TRY(dtrain_strategy_gather(s, 1, DTRAIN_PASS_BACKWARD));
        fill(&p[2], 1);
        RANKS_TRY(dtrain_strategy_ready(s, 2));
        result = fail_somehow(world, s, d->which);
    }
    CHECK(result != DTRAIN_OK);
    dtrain_strategy_destroy(s);
    snprintf(d->heard[rank], sizeof d->heard[rank], "%s", dtrain_last_error());
    if (rank == 1) ranks_await(&d->ended, 2);
    if (rank == 1) ranks_sleep_us(20000); /* the others are at their very end */
    ranks_count(&d->ended);
    return rank == 1 ? 5 : 40;
}
static void test_first_cause(void)
{
    downfall *d = (downfall *)ranks_shared(sizeof *d);
    for (int run = 0; run < 12; run++) {
        dtrain_launch_desc desc = ranks_desc(3, (uint32_t)run % 2);
        dtrain_launch_info info;
        const char *cause = causes[run % 3];
        memset(d, 0, sizeof *d);
        d->which = run % 3;
        d->kind = DTRAIN_STRATEGY_DDP + (uint32_t)run % ALL_KINDS;
        CHECK(ranks_launch(&desc, downfall_rank, d, &info) == DTRAIN_ERROR_RANK_FAILED);
        CHECK_MSG(info.first_failed_rank == 1 && info.exit_code == 5 &&
                      strstr(dtrain_last_error(), cause),
                  "run %d: rank %d, exit code %d: %s", run, info.first_failed_rank, info.exit_code,
                  dtrain_last_error());
        for (int r = 0; r < 3; r++)
            CHECK_MSG(strstr(d->heard[r], cause), "run %d, rank %d: %s", run, r, d->heard[r]);
    }
}

/* ---- Decisions ------------------------------------------------------------------------------------ */

/* Two nodes of three ranks: what a rank sees of its own node is not what the others see of theirs, when some of them
 * make a strategy. */
static int nodes_rank(dtrain_world *world, void *user)
{
    static const int members[][6] = {
        {1, 1, 0, 1, 1, 0}, {1, 1, 1, 1, 0, 0}, {1, 0, 0, 1, 1, 0}, {1, 1, 1, 1, 1, 1}};
    static const int sizes[] = {2, 0, 0, 3}; /* of the nodes; 0: they differ */
    const int rank = dtrain_world_rank(world);
    (void)user;
    for (int i = 0; i < 4; i++)
        for (int kind = 0; kind < 3; kind++) {
            dtrain_strategy_desc desc;
            dtrain_strategy_info info;
            dtrain_strategy *s;
            dtrain_comm *comm;
            dtrain_param p = one_param("a", 0);
            memset(&desc, 0, sizeof desc);
            RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), members[i][rank], rank, &comm));
            if (members[i][rank]) {
                desc.kind = kind == 0   ? DTRAIN_STRATEGY_HYBRID_SHARD
                            : kind == 1 ? DTRAIN_STRATEGY_DDP
                                        : DTRAIN_STRATEGY_AUTO;
                desc.hierarchical = kind == 1;
                desc.comm = comm;
                const dtrain_result result = dtrain_strategy_create(world, &p, 1, &desc, &s);
                dtrain_strategy_query(s, &info);
                if (kind < 2 && sizes[i] == 0)
                    CHECK_MSG(result == DTRAIN_ERROR_ARGUMENT &&
                                  strstr(dtrain_last_error(), "node_size is 0"),
                              "members %d, rank %d: %s", i, rank, dtrain_last_error());
                else
                    CHECK_MSG(result == DTRAIN_OK, "members %d, rank %d: %s", i, rank,
                              dtrain_last_error());
                if (kind < 2 && sizes[i]) CHECK((int)info.desc.node_size == sizes[i]);
                dtrain_strategy_destroy(s);
            }
            dtrain_comm_destroy(comm);
        }
    return 0;
}
static void test_uneven_nodes(void)
{
    dtrain_launch_desc desc = ranks_desc(6, DTRAIN_LAUNCH_THREADS);
    desc.options.node_ranks = 3;
    CHECK_MSG(ranks_launch(&desc, nodes_rank, NULL, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
}

/* Rank 1 owns its gradients, which is more memory: AUTO takes for all what fits there too. */
static int auto_rank(dtrain_world *world, void *user)
{
    enum { LARGE = 100000 };
    static float own[LARGE];
    dtrain_param p = ranks_param("a", NULL, NULL, LARGE, 0), q = p;
    dtrain_strategy_desc desc;
    dtrain_strategy_info info;
    dtrain_memory without, with;
    dtrain_strategy *s;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.kind = DTRAIN_STRATEGY_ZERO1;
    RANKS_TRY(dtrain_strategy_plan(&q, 1, &desc, 2, &without));
    q = p;
    q.grad = own;
    RANKS_TRY(dtrain_strategy_plan(&q, 1, &desc, 2, &with));
    CHECK(with.total > without.total);
    desc.kind = DTRAIN_STRATEGY_AUTO;
    desc.memory_limit = (without.total + with.total) / 2;
    if (dtrain_world_rank(world) == 1) p.grad = own;
    const dtrain_result result = dtrain_strategy_create(world, &p, 1, &desc, &s);
    dtrain_strategy_query(s, &info);
    CHECK_MSG(result == DTRAIN_OK ? info.desc.kind > DTRAIN_STRATEGY_ZERO1
                                  : result == DTRAIN_ERROR_MEMORY,
              "%s: %s", dtrain_result_text(result),
              result == DTRAIN_OK ? info.name : dtrain_last_error());
    dtrain_strategy_destroy(s);
    return 0;
}
static void test_auto_agrees(void) { ranks_run(2, DTRAIN_LAUNCH_THREADS, auto_rank, NULL); }

/* Ranks that compress other slices of a bucket hold different amounts: the plan is that of the one with most. */
static int plan_rank(dtrain_world *world, void *user)
{
    int64_t *held = (int64_t *)user;
    const int rank = dtrain_world_rank(world);
    dtrain_param p[2] = {ranks_param("large", NULL, NULL, 300, 300),
                         ranks_param("small", NULL, NULL, 70, 0)},
                 q[2];
    dtrain_compression_desc topk;
    dtrain_strategy_desc desc;
    dtrain_strategy_info info;
    dtrain_memory plan;
    dtrain_strategy *s;
    memset(&topk, 0, sizeof topk);
    memset(&desc, 0, sizeof desc);
    topk.kind = DTRAIN_COMPRESSION_TOPK;
    topk.topk_ratio = 0.5f;
    desc.compression = &topk;
    desc.hierarchical = true;
    desc.node_size = 2;
    memcpy(q, p, sizeof q);
    RANKS_TRY(dtrain_strategy_plan(q, 2, &desc, 4, &plan));
    RANKS_TRY(dtrain_strategy_create(world, p, 2, &desc, &s));
    dtrain_strategy_query(s, &info);
    held[rank] = (int64_t)info.buffer_bytes;
    RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
    int64_t most = 0, least = INT64_MAX;
    for (int r = 0; r < 4; r++) {
        most = held[r] > most ? held[r] : most;
        least = held[r] < least ? held[r] : least;
    }
    CHECK_MSG((int64_t)plan.buffers == most, "planned %lld, held %lld to %lld",
              (long long)plan.buffers, (long long)least, (long long)most);
    CHECK(least < most && held[0] < most); /* or this tests nothing */
    dtrain_strategy_destroy(s);
    return 0;
}
/* Rank 1's slice is that of a group with two states a parameter, rank 0's of one without any: the plan is rank 1's. */
static int plan_groups_rank(dtrain_world *world, void *user)
{
    static const uint32_t none = DTRAIN_OPTIMIZER_STATES_NONE;
    const dtrain_optimizer_desc sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_param p[2] = {ranks_param("first", NULL, NULL, 64, 64),
                         ranks_param("second", NULL, NULL, 64, 64)},
                 q[2];
    dtrain_strategy_desc desc;
    dtrain_optimizer_info info;
    dtrain_memory plan;
    dtrain_strategy *s;
    dtrain_optimizer *optimizer;
    int64_t *held = (int64_t *)user;
    const int rank = dtrain_world_rank(world);
    adamw.groups = &sgd, adamw.group_count = 1;
    p[1].group = 1;
    for (uint32_t kind = DTRAIN_STRATEGY_ZERO1; kind <= ALL_KINDS; kind++) {
        memset(&desc, 0, sizeof desc);
        desc.kind = kind;
        desc.node_size = kind == DTRAIN_STRATEGY_HYBRID_SHARD ? 2 : 0;
        desc.group_states = &none, desc.group_count = 1;
        memcpy(q, p, sizeof q);
        RANKS_TRY(dtrain_strategy_plan(q, 2, &desc, 2, &plan));
        memcpy(q, p, sizeof q);
        RANKS_TRY(dtrain_strategy_create(world, q, 2, &desc, &s));
        RANKS_TRY(dtrain_optimizer_create(world, s, &adamw, &optimizer));
        dtrain_optimizer_query(optimizer, &info);
        held[rank] = (int64_t)info.state_bytes;
        RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
        CHECK_MSG((int64_t)plan.optimizer == (held[0] > held[1] ? held[0] : held[1]),
                  "kind %u: planned %lld, held %lld and %lld", kind, (long long)plan.optimizer,
                  (long long)held[0], (long long)held[1]);
        CHECK(held[0] != held[1]); /* or this tests nothing */
        RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
        dtrain_optimizer_destroy(optimizer);
        dtrain_strategy_destroy(s);
    }
    return 0;
}

static void test_plan_of_most(void)
{
    ranks_run(4, DTRAIN_LAUNCH_THREADS, plan_rank, ranks_shared(4 * sizeof(int64_t)));
    ranks_run(2, DTRAIN_LAUNCH_THREADS, plan_groups_rank, ranks_shared(2 * sizeof(int64_t)));
}

/* Ranks that come to different calls hear which, and can go on. */
static int calls_rank(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world);
    dtrain_param p = one_param("a", 0);
    dtrain_mesh *mesh = NULL;
    dtrain_strategy *s = NULL;
    (void)user;
    const dtrain_result result = rank == 2 ? dtrain_mesh_create(world, NULL, &mesh)
                                           : dtrain_strategy_create(world, &p, 1, NULL, &s);
    CHECK_MSG(result == DTRAIN_ERROR_MISMATCH &&
                  strstr(dtrain_last_error(),
                         "rank 2 has come to \"dtrain_mesh_create\", the others "
                         "have come to \"dtrain_strategy_create\""),
              "rank %d: %s", rank, dtrain_last_error());
    RANKS_TRY(dtrain_strategy_create(world, &p, 1, NULL, &s));
    dtrain_strategy_destroy(s);
    return 0;
}
static void test_other_calls(void) { ranks_run(3, DTRAIN_LAUNCH_THREADS, calls_rank, NULL); }

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_lacking);
    RUN(test_moments);
    RUN(test_activations_again);
    RUN(test_first_cause);
    RUN(test_uneven_nodes);
    RUN(test_auto_agrees);
    RUN(test_plan_of_most);
    RUN(test_other_calls);
    return test_summary();
}
