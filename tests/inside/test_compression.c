/* test_compression.c: compressed and hierarchical gradients.
 *
 * The field is a set of tensors whose gradients are functions of (rank, step, micro-batch, tensor,
 * element): the parent computes what every rank must have after every step with plain loops, qsort
 * and doubles, ranks only report what they found. Then: whole trainings, state, memory, refusals.
 *
 * These were broken on purpose, and noticed by
 *
 *     test_topk_ranks                 shares rounded down; sums in another order; old gradients under
 *                                     new ones; tensors of one dimension compressed
 *     test_topk_ratios                a masked bucket without its 1/N
 *     test_topk_cast                  what rounding takes away is lost
 *     test_topk_dense_below           one element too many; dense tensors not copied back
 *     test_dense_steps_and_warmup     a dense step too few; a warm-up that is a step ahead
 *     test_topk_between_nodes         the factor of nodes instead of ranks; pieces that all begin at 0
 *     test_nodes                      nodes that do not gather
 *     test_nodes_in_range             sums over a node as fp16
 *     test_node_kinds_4_ranks         shards that are sums
 *     test_bytes, test_plan           dense tensors not counted; state without residuals */
#include "strategy/strategy_internal.h"
#include "strategy/view_internal.h"
#include "dtrain.h"

#include "test.h"
#include "ranks.h"
#include "strategy_model.h"
#include "null_step.h"

#include <float.h>
#include <sys/time.h>

/* ---- the field ---- */

enum { WIDE, BIAS, SINGLE, TIED, STILL, SMALL, DEEP, LONG, LOST, SHY, ROW, TIED_TOO, FIELD_PARAMS };
enum { FIELD_STEPS = 8, FIELD_RANKS = 8, FIELD_TOTAL = 9000 };

/* TIED is full of equal magnitudes and zeros, ROW has one magnitude; TIED_TOO is TIED once more; LOST
 * never gets a gradient, SHY not in step 2 of rank 1; BIAS and LONG have one dimension. */
static const struct {
    const char *name;
    int64_t shape[4];
} field_tensors[FIELD_PARAMS] = {
    {"wide", {37, 41, 0, 0}}, {"bias", {41, 0, 0, 0}},   {"single", {1, 0, 0, 0}},
    {"tied", {30, 50, 0, 0}}, {"still", {20, 20, 0, 0}}, {"small", {5, 9, 0, 0}},
    {"deep", {7, 11, 13, 0}}, {"long", {2000, 0, 0, 0}}, {"lost", {16, 40, 0, 0}},
    {"shy", {25, 33, 0, 0}},  {"row", {1, 300, 0, 0}},   {"head", {0, 0, 0, 0}},
};

typedef struct field_case {
    int ranks, steps, micro,
        copying; /* gradients of the host's own: 0 nobody, 1 all, 2 odd ranks */
    uint32_t mode;
    bool shuffle; /* other orders of ready on every rank */
    bool poison;  /* a NaN, an infinity, denormals and -0 in step 1 of the last rank */
    float factor; /* of gradients without a rule of their own; 0 = 1 */
    bool group;   /* the odd half of twice as many ranks, the others do the same beside */
    int emulated; /* ranks of an emulated node, or 0 */
    dtrain_strategy_desc desc;
    dtrain_compression_desc how; /* dense_steps 0: none */
} field_case;

/* What the ranks found, or should. */
typedef struct field_seen {
    float mean[FIELD_RANKS][FIELD_STEPS][FIELD_TOTAL];
    float residual[FIELD_RANKS][FIELD_TOTAL], velocity[FIELD_RANKS][FIELD_TOTAL];
    bool compressed[FIELD_RANKS][FIELD_PARAMS];
    int64_t first[FIELD_RANKS][FIELD_PARAMS], pieces[FIELD_RANKS][FIELD_PARAMS];
    uint64_t wire_bytes[FIELD_RANKS][FIELD_STEPS];
    dtrain_strategy_info info[FIELD_RANKS];
    dtrain_comm_info last[FIELD_RANKS]; /* bytes of the last step */
} field_seen;

static int64_t field_count(int p)
{
    int64_t count = 1;
    int i;
    for (i = 0; i < 4 && field_tensors[p].shape[i]; i++) count *= field_tensors[p].shape[i];
    return i ? count : 0;
}

/* Where a tensor begins in the arrays of field_seen. */
static int64_t field_at(int p)
{
    int64_t at = 0;
    while (p-- > 0) at += field_count(p);
    return at;
}

static bool field_missing(int p, int rank, int step)
{
    return p == LOST || (p == SHY && rank == 1 && step == 2);
}

/* Random signs and mantissas, eight binades: another order of summation shows. */
static float field_noise(uint64_t x)
{
    const uint32_t word = (uint32_t)(x >> 63) << 31 | (123 + (uint32_t)(x >> 60 & 7)) << 23 |
                          ((uint32_t)x & 0x7fffff);
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static uint64_t field_mix(int p, int rank, int step, int micro, int64_t i)
{
    const uint64_t who = (((uint64_t)p * 64 + (uint64_t)rank) * 64 + (uint64_t)step) * 8;
    return ranks_mix(ranks_mix(who + (uint64_t)micro) ^ (uint64_t)i);
}

static float field_grad(const field_case *c, int p, int rank, int step, int micro, int64_t i)
{
    const uint64_t x = field_mix(p, rank, step, micro, i);
    if (c->poison && rank == c->ranks - 1 && step == 1) {
        if (p == WIDE && i == 77) return NAN;
        if (p == DEEP && i == 78) return -INFINITY;
        if (p == SHY) return x & 1 ? -0.0f : (float)(x & 1022) * 1.4e-45f;
    }
    if (p == TIED || p == TIED_TOO) return (x & 1024 ? -0.25f : 0.25f) * (float)(x % 7);
    if (p == ROW) return x & 1024 ? -1.5f : 1.5f;
    return field_noise(x) * (c->factor != 0 ? c->factor : 1);
}

/* What a rank has before reduction: micro-batches added in the order in which backward emits them,
 * that is the head before the embedding it is tied to. */
static float field_own(const field_case *c, int p, int rank, int step, int64_t i)
{
    float sum = 0;
    int micro;
    if (field_missing(p, rank, step)) return 0;
    for (micro = 0; micro < c->micro; micro++) {
        if (p == TIED) {
            const float head = field_grad(c, TIED_TOO, rank, step, micro, i);
            sum = micro ? sum + head : head;
            sum += field_grad(c, p, rank, step, micro, i);
        } else {
            const float g = field_grad(c, p, rank, step, micro, i);
            sum = micro ? sum + g : g;
        }
    }
    return sum;
}

static bool field_trained(int p) { return p != STILL && p != TIED_TOO; }

/* ---- oracles ---- */

/* As it travels. */
static float rounded(uint32_t dtype, float x)
{
    if (dtype == DTRAIN_DTYPE_BF16)
        return dtrain_half_to_f32(DTRAIN_DTYPE_BF16, dtrain_half_from_f32(DTRAIN_DTYPE_BF16, x));
    if (dtype == DTRAIN_DTYPE_F16)
        return dtrain_half_to_f32(DTRAIN_DTYPE_F16, dtrain_half_from_f32(DTRAIN_DTYPE_F16, x));
    return x;
}

static int tensor_dims(int p)
{
    int n = 0;
    while (n < 4 && field_tensors[p].shape[n]) n++;
    return n;
}

/* Of two ranks or nodes that exchange anything. */
static bool topk_compresses(const field_case *c, int p)
{
    const int hops = c->desc.hierarchical ? c->ranks / (int)c->desc.node_size : c->ranks;
    return hops > 1 && field_trained(p) && tensor_dims(p) > 1 &&
           field_count(p) >= c->how.dense_below;
}

/* The share that is sent in a step. */
static double topk_ratio_at(const dtrain_compression_desc *how, int step)
{
    const double after = (double)step - (double)how->dense_steps, all = (double)how->warmup_steps;
    if (after >= all) return (double)how->topk_ratio;
    return (double)how->warmup_ratio *
           pow((double)how->topk_ratio / (double)how->warmup_ratio, after / all);
}

static int64_t topk_count(double ratio, int64_t count)
{
    const int64_t k = (int64_t)floor(ratio * (double)count + 0.5);
    return k < 1 ? 1 : k > count ? count : k;
}

typedef struct candidate {
    double size;
    int64_t place;
} candidate;

/* Larger first, NaN before all, then by place. */
static int candidate_order(const void *a, const void *b)
{
    const candidate *x = (const candidate *)a, *y = (const candidate *)b;
    if (x->size != y->size) return x->size > y->size ? -1 : 1;
    return x->place < y->place ? -1 : 1;
}

static int place_order(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* places (k) = where x is largest, ascending. */
static void largest(const float *x, int64_t count, int64_t k, int64_t *places)
{
    candidate *all = (candidate *)malloc((size_t)count * sizeof *all);
    int64_t i;
    for (i = 0; i < count; i++) {
        all[i].size = isnan(x[i]) ? HUGE_VAL : fabs((double)x[i]);
        if (isinf(x[i])) all[i].size = DBL_MAX;
        all[i].place = i;
    }
    qsort(all, (size_t)count, sizeof *all, candidate_order);
    for (i = 0; i < k; i++) places[i] = all[i].place;
    qsort(places, (size_t)k, sizeof *places, place_order);
    free(all);
}

/* What is kept after x (count) came: residual += x, or velocity = m velocity + x; residual += it. */
static void keep(const dtrain_compression_desc *how, float *residual, float *velocity,
                 const float *x, int64_t count)
{
    int64_t i;
    for (i = 0; i < count; i++) {
        float step = x[i];
        if (how->topk_momentum != 0) {
            volatile float product = how->topk_momentum * velocity[i];
            step = velocity[i] = product + x[i];
        }
        residual[i] = how->no_error_feedback ? step : residual[i] + step;
    }
}

/* One tensor of one step, all ranks: everybody's largest, added up in rank order. */
static void oracle_all_gather(const field_case *c, field_seen *t, int p, int step)
{
    const int64_t count = field_count(p), at = field_at(p);
    const int64_t k = topk_count(topk_ratio_at(&c->how, step), count);
    const float share = 1 / (float)c->ranks;
    float *x = (float *)calloc((size_t)count, sizeof *x), *mean = t->mean[0][step] + at;
    int64_t *places = (int64_t *)calloc((size_t)k, sizeof *places), i;
    int r;
    for (r = 0; r < c->ranks; r++) {
        float *residual = t->residual[r] + at, *velocity = t->velocity[r] + at;
        for (i = 0; i < count; i++) x[i] = field_own(c, p, r, step, i);
        keep(&c->how, residual, velocity, x, count);
        largest(residual, count, k, places);
        for (i = 0; i < k; i++) {
            const float sent = rounded(c->desc.reduce_dtype, residual[places[i]]);
            volatile float part = share * sent;
            mean[places[i]] += part;
            residual[places[i]] -= sent;
            if (!isfinite(sent)) residual[places[i]] = 0;
            velocity[places[i]] = 0;
        }
        for (i = 0; i < count && c->how.no_error_feedback; i++) residual[i] = 0;
    }
    free(places);
    free(x);
}

/* Rank order, one factor, one rounding. */
static void oracle_plain(const field_case *c, field_seen *t, int p, int step)
{
    const int64_t count = field_count(p), at = field_at(p);
    const float share = 1 / (float)c->ranks;
    int64_t i;
    int r;
    for (i = 0; i < count; i++) {
        float sum = rounded(c->desc.reduce_dtype, field_own(c, p, 0, step, i));
        for (r = 1; r < c->ranks; r++)
            sum += rounded(c->desc.reduce_dtype, field_own(c, p, r, step, i));
        t->mean[0][step][at + i] = rounded(c->desc.reduce_dtype, sum * share);
    }
}

typedef void (*oracle_fn)(const field_case *c, field_seen *t, int p, int step);

/* All steps of a case; `compressed` for tensors that are, after the dense steps. */
static field_seen *field_truth(const field_case *c, oracle_fn compressed)
{
    field_seen *t = (field_seen *)ranks_shared(sizeof *t);
    int step, p;
    for (step = 0; step < c->steps; step++)
        for (p = 0; p < FIELD_PARAMS; p++) {
            const bool dense =
                !compressed || (uint64_t)step < c->how.dense_steps || !topk_compresses(c, p);
            if (!field_trained(p)) continue;
            if (dense) oracle_plain(c, t, p, step);
            else compressed(c, t, p, step);
        }
    return t;
}

/* ---- ranks ---- */

typedef struct field {
    dtrain_param params[FIELD_PARAMS];
    float values[FIELD_TOTAL], grads[FIELD_TOTAL];
} field;

typedef struct field_run {
    const field_case *c;
    field_seen *seen;
} field_run;

static void field_init(field *f, const field_case *c, int rank)
{
    const bool copy = c->copying == 1 || (c->copying == 2 && rank % 2);
    int p;
    memset(f, 0, sizeof *f);
    for (p = 0; p < FIELD_PARAMS; p++) {
        f->params[p] = ranks_param(field_tensors[p].name, f->values + field_at(p),
                                   copy ? f->grads + field_at(p) : NULL, 0, 0);
        memcpy(f->params[p].shape, field_tensors[p].shape, sizeof f->params[p].shape);
        f->params[p].unit = (uint32_t)p / 4;
    }
    f->params[STILL].flags = DTRAIN_PARAM_FROZEN;
    f->params[STILL].grad = NULL;
    f->params[TIED_TOO].alias_of = &f->params[TIED];
    f->params[TIED_TOO].value = f->params[TIED_TOO].grad = NULL;
}

static dtrain_result field_backward(field *f, const field_case *c, dtrain_strategy *s, int rank,
                                    int step, int micro)
{
    uint64_t state = (uint64_t)(rank * 100 + step);
    int order[FIELD_PARAMS], n, k;
    int64_t i;
    for (n = 0; n < FIELD_PARAMS; n++) order[n] = FIELD_PARAMS - 1 - n;
    for (n = FIELD_PARAMS - 1; n > 0 && c->shuffle; n--) {
        const int other = (int)ranks_random(&state, (uint64_t)n + 1), swap = order[n];
        order[n] = order[other], order[other] = swap;
    }
    for (n = 0; n < FIELD_PARAMS; n++) {
        dtrain_param *q = &f->params[k = order[n]], *to = q->state.storage;
        if (k == STILL || field_missing(k, rank, step)) continue;
        for (i = 0; i < q->count; i++) {
            const float g = field_grad(c, k, rank, step, micro, i);
            to->grad[i] = to->state.grad_written ? to->grad[i] + g : g;
        }
        TRY(dtrain_strategy_ready(s, (size_t)k));
    }
    return dtrain_strategy_finish(s);
}

static dtrain_result field_step(field *f, const field_case *c, dtrain_strategy *s, int rank,
                                int step)
{
    int micro;
    for (micro = 0; micro < c->micro; micro++) {
        TRY(dtrain_strategy_accumulate(s, micro + 1 < c->micro));
        TRY(field_backward(f, c, s, rank, step, micro));
    }
    return DTRAIN_OK;
}

/* What compression keeps, at the places of its tensors. */
static dtrain_result field_keep(const field *f, const field_case *c, dtrain_strategy *s, int rank,
                                field_seen *seen)
{
    const dtrain__kept *states;
    size_t count, i;
    states = dtrain__kept_of(s, &count);
    for (i = 0; i < count; i++) {
        const int p = (int)(states[i].param - f->params);
        const int64_t at = field_at(p) + states[i].offset;
        const size_t bytes = (size_t)states[i].count * sizeof(float);
        seen->compressed[rank][p] = true;
        seen->first[rank][p] = states[i].offset, seen->pieces[rank][p] = states[i].count;
        if (!CHECK(states[i].offset >= 0 && states[i].offset + states[i].count <= field_count(p)))
            continue;
        if (states[i].residual) memcpy(seen->residual[rank] + at, states[i].residual, bytes);
        if (states[i].velocity) memcpy(seen->velocity[rank] + at, states[i].velocity, bytes);
        CHECK((states[i].residual != NULL) == !c->how.no_error_feedback);
        CHECK((states[i].velocity != NULL) == (c->how.topk_momentum > 0));
    }
    return DTRAIN_OK;
}

/* In full force a step sends what a second strategy counts without the other ranks. */
static void check_counted(dtrain_world *world, const field_case *c, dtrain_strategy_desc desc,
                          const dtrain_comm_info *before, const dtrain_comm_info *after, int rank)
{
    const dtrain_comm *comm = desc.comm ? desc.comm : dtrain_world_comm(world);
    const int nodes = desc.hierarchical || desc.kind == DTRAIN_STRATEGY_HYBRID_SHARD
                          ? dtrain_comm_size(comm) / (int)desc.node_size
                          : 0;
    dtrain_compression_desc how = c->how;
    dtrain_comm_info counted;
    const uint64_t bytes = after->wire_bytes - before->wire_bytes;
    const uint64_t calls = after->operation_count - before->operation_count;
    if ((uint64_t)c->steps <= c->how.dense_steps + c->how.warmup_steps) return;
    const uint64_t away = after->node_bytes - before->node_bytes;
    CHECK((away > 0) == (c->emulated > 0 && c->emulated < c->ranks));
    field *f = (field *)malloc(sizeof *f);
    field_init(f, c, rank);
    how.dense_steps = DTRAIN_DENSE_STEPS_NONE;
    how.warmup_steps = 0;
    desc.compression = &how;
    CHECK(null_step(world, f->params, FIELD_PARAMS, desc, nodes, 1, (uint32_t)c->micro, &counted) ==
          DTRAIN_OK);
    CHECK_MSG(bytes == counted.wire_bytes && calls == counted.operation_count,
              "rank %d sent %llu bytes in %llu collectives, counted: %llu in %llu", rank,
              (unsigned long long)bytes, (unsigned long long)calls,
              (unsigned long long)counted.wire_bytes, (unsigned long long)counted.operation_count);
    CHECK_MSG(away == counted.node_bytes, "rank %d sent %llu bytes to other nodes, counted: %llu",
              rank, (unsigned long long)away, (unsigned long long)counted.node_bytes);
    free(f);
}

static int field_rank(dtrain_world *world, void *user)
{
    const field_run *run = (const field_run *)user;
    const int color = run->c->group ? dtrain_world_rank(world) % 2 : 0;
    const int rank = dtrain_world_rank(world) / (run->c->group ? 2 : 1);
    dtrain_strategy_desc desc = run->c->desc;
    dtrain_compression_desc how = run->c->how;
    field_seen *seen = color ? (field_seen *)calloc(1, sizeof *seen) : run->seen;
    field *f = (field *)malloc(sizeof *f);
    dtrain_comm_info before, after;
    dtrain_strategy *s;
    int step, p;
    field_init(f, run->c, rank);
    if (how.dense_steps == 0) how.dense_steps = DTRAIN_DENSE_STEPS_NONE;
    desc.compression = &how;
    if (run->c->group)
        RANKS_TRY(dtrain_comm_split(dtrain_world_comm(world), color, rank, &desc.comm));
    RANKS_TRY(dtrain_strategy_create(world, f->params, FIELD_PARAMS, &desc, &s));
    for (step = 0; step < run->c->steps; step++) {
        before = strategy_sent(s);
        RANKS_TRY(field_step(f, run->c, s, rank, step));
        after = strategy_sent(s);
        seen->wire_bytes[rank][step] = after.wire_bytes - before.wire_bytes;
        for (p = 0; p < FIELD_PARAMS; p++)
            if (field_trained(p))
                memcpy(seen->mean[rank][step] + field_at(p), f->params[p].grad,
                       (size_t)field_count(p) * sizeof(float));
    }
    RANKS_TRY(field_keep(f, run->c, s, rank, seen));
    dtrain_strategy_query(s, &seen->info[rank]);
    seen->last[rank].wire_bytes = after.wire_bytes - before.wire_bytes;
    seen->last[rank].node_bytes = after.node_bytes - before.node_bytes;
    dtrain_strategy_destroy(s);
    check_counted(world, run->c, seen->info[rank].desc, &before, &after, rank);
    if (desc.comm) dtrain_comm_destroy(desc.comm);
    if (color) free(seen);
    free(f);
    return 0;
}

static field_seen *field_train(const field_case *c)
{
    dtrain_launch_desc desc = ranks_desc(c->group ? 2 * c->ranks : c->ranks, c->mode);
    field_run run;
    run.c = c;
    run.seen = (field_seen *)ranks_shared(sizeof *run.seen);
    if (c->emulated) {
        desc.options.node_ranks = (uint32_t)c->emulated;
    }
    CHECK_MSG(ranks_launch(&desc, field_rank, &run, NULL) == DTRAIN_OK, "%d ranks, %s: %s",
              c->ranks, ranks_mode_name(c->mode), dtrain_last_error());
    return run.seen;
}

static void seen_free(field_seen *seen) { munmap(seen, sizeof *seen); }

static field_case usual(int ranks, uint32_t compression)
{
    field_case c;
    memset(&c, 0, sizeof c);
    c.ranks = ranks;
    c.steps = 5;
    c.micro = 1;
    c.mode = DTRAIN_LAUNCH_THREADS;
    c.how.kind = compression;
    c.how.dense_below = 100;
    c.how.dense_steps = 0;
    c.how.topk_ratio = 0.03f;
    c.desc.bucket_bytes = 5000;
    return c;
}

/* ---- judging ---- */

/* Equal bits, or both NaN, in all tensors of a row of values. */
static bool rows_equal(const float *found, const float *expected, const char *what, int rank,
                       int step)
{
    int p;
    int64_t i;
    for (p = 0; p < FIELD_PARAMS; p++)
        for (i = field_at(p); i < field_at(p) + field_count(p) && p != STILL; i++) {
            if (memcmp(&found[i], &expected[i], sizeof *found) == 0) continue;
            if (isnan(found[i]) && isnan(expected[i])) continue;
            return CHECK_MSG(0, "%s: rank %d, step %d: \"%s\"[%lld] is %.9g, expected %.9g", what,
                             rank, step, field_tensors[p].name, (long long)(i - field_at(p)),
                             (double)found[i], (double)expected[i]);
        }
    return CHECK(1);
}

/* The means of all ranks and steps; with `kept` also what every rank kept. */
static void check_equal(const field_case *c, const field_seen *seen, const field_seen *truth,
                        bool kept, const char *what)
{
    int r, step;
    for (r = 0; r < c->ranks; r++) {
        for (step = 0; step < c->steps; step++)
            if (!rows_equal(seen->mean[r][step], truth->mean[0][step], what, r, step)) return;
        if (!kept) continue;
        rows_equal(seen->residual[r], truth->residual[r], "residual", r, c->steps);
        rows_equal(seen->velocity[r], truth->velocity[r], "velocity", r, c->steps);
    }
}

static void check_topk(const field_case *c, const char *what)
{
    field_seen *truth = field_truth(c, oracle_all_gather), *seen = field_train(c);
    int p, r;
    check_equal(c, seen, truth, true, what);
    for (r = 0; r < c->ranks; r++)
        for (p = 0; p < FIELD_PARAMS; p++)
            CHECK_MSG(seen->compressed[r][p] == topk_compresses(c, p) &&
                          (!seen->compressed[r][p] || seen->pieces[r][p] == field_count(p)),
                      "%s: \"%s\" has %lld elements of state", what, field_tensors[p].name,
                      (long long)seen->pieces[r][p]);
    seen_free(truth);
    seen_free(seen);
}

/* ---- top-k, all-gather ---- */

static void test_topk_ranks(void)
{
    int ranks;
    for (ranks = 1; ranks <= 8; ranks++) {
        field_case c = usual(ranks, DTRAIN_COMPRESSION_TOPK);
        char what[40];
        c.mode = ranks % 3 ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES;
        snprintf(what, sizeof what, "top-k, %d ranks", ranks);
        check_topk(&c, what);
    }
}

static void test_topk_ratios(void)
{
    static const float ratios[] = {1.0f, 0.3f, 0.1f, 0.01f, 0.001f, 1e-9f};
    size_t i;
    for (i = 0; i < sizeof ratios / sizeof *ratios; i++) {
        field_case c = usual(3, DTRAIN_COMPRESSION_TOPK);
        c.how.topk_ratio = ratios[i];
        c.steps = 3;
        check_topk(&c, "ratio");
    }
}

static void test_topk_momentum(void)
{
    int i;
    for (i = 0; i < 4; i++) {
        field_case c = usual(i < 2 ? 4 : 3, DTRAIN_COMPRESSION_TOPK);
        c.how.topk_momentum = i % 2 ? 0.9f : 0.5f;
        c.steps = 6;
        c.how.dense_steps = i == 3 ? 1 : 0;
        check_topk(&c, "momentum");
    }
}

/* Buckets, overlap, places of gradients, order of ready and micro-batches change no bit. */
static void test_topk_same_bits(void)
{
    static const size_t buckets[] = {64, 3000, 9000, (size_t)1 << 20};
    size_t i;
    for (i = 0; i < 12; i++) {
        field_case c = usual(3, DTRAIN_COMPRESSION_TOPK);
        c.desc.bucket_bytes = buckets[i % 4];
        c.desc.no_overlap = i / 2 % 2 != 0;
        c.copying = (int)i % 3;
        c.shuffle = i % 5 == 4;
        c.micro = i >= 6 && !c.shuffle ? 3 : 1;
        c.desc.accumulation = i >= 9 ? DTRAIN_ACCUMULATION_LAST : DTRAIN_ACCUMULATION_DEFAULT;
        check_topk(&c, "bits");
    }
}

static void test_topk_without_feedback(void)
{
    field_case c = usual(4, DTRAIN_COMPRESSION_TOPK);
    c.how.no_error_feedback = true;
    check_topk(&c, "no error feedback");
}

/* Values travel as 16 bits, and what rounding takes away stays here. */
static void test_topk_cast(void)
{
    int i;
    for (i = 0; i < 8; i++) {
        field_case c = usual(i % 4 < 2 ? 4 : 3, DTRAIN_COMPRESSION_TOPK);
        c.desc.reduce_dtype = i % 2 ? DTRAIN_DTYPE_F16 : DTRAIN_DTYPE_BF16;
        c.how.topk_ratio = i < 4 ? 0.03f : 0.6f;
        c.how.topk_momentum = i == 5 ? 0.5f : 0;
        c.desc.bucket_bytes = i % 3 ? 64 : 20000;
        c.how.dense_steps = i == 2 ? 2 : 0;
        check_topk(&c, "values of 16 bits");
    }
}

static void test_topk_dense_below(void)
{
    static const int64_t limits[] = {1, 45, 46, 300, 1001, 1002, 1 << 20};
    size_t i;
    for (i = 0; i < sizeof limits / sizeof *limits; i++) {
        field_case c = usual(2, DTRAIN_COMPRESSION_TOPK);
        c.how.dense_below = limits[i];
        c.steps = 3;
        check_topk(&c, "dense_below");
    }
}

/* The first steps have the bits of plain DDP; then the share falls by a constant factor. */
static void test_dense_steps_and_warmup(void)
{
    field_case c = usual(3, DTRAIN_COMPRESSION_TOPK), plain = usual(3, DTRAIN_COMPRESSION_NONE);
    field_seen *truth, *seen, *whole = field_train(&plain);
    int step, r;
    c.steps = 8;
    c.how.dense_steps = 2;
    c.how.warmup_steps = 4;
    c.how.warmup_ratio = 0.25f;
    c.how.topk_ratio = 0.015625f;
    check_topk(&c, "warm-up");
    seen = field_train(&c);
    truth = field_truth(&c, oracle_all_gather);
    for (r = 0; r < 3; r++) {
        for (step = 0; step < 2; step++)
            rows_equal(seen->mean[r][step], whole->mean[r][step], "dense step", r, step);
        for (step = 2; step < 6; step++)
            CHECK(seen->wire_bytes[r][step] > seen->wire_bytes[r][step + 1]);
        CHECK(seen->wire_bytes[r][6] == seen->wire_bytes[r][7]);
        CHECK(seen->wire_bytes[r][1] == whole->wire_bytes[r][1]);
    }
    c.how.dense_steps = 100;
    seen_free(seen);
    seen = field_train(&c);
    for (step = 0; step < plain.steps; step++)
        rows_equal(seen->mean[1][step], whole->mean[1][step], "never compressed", 1, step);
    seen_free(truth);
    seen_free(seen);
    seen_free(whole);
}

/* NaN is taken before infinity and that before all numbers: they reach every rank at once, and are gone
 * from what is kept. */
static void test_poison(void)
{
    field_case c = usual(4, DTRAIN_COMPRESSION_TOPK);
    field_seen *seen;
    int r;
    int64_t i;
    c.poison = true;
    check_topk(&c, "NaN and infinity");
    seen = field_train(&c);
    for (r = 0; r < 4; r++) {
        CHECK(isnan(seen->mean[r][1][field_at(WIDE) + 77]));
        CHECK(!isfinite(seen->mean[r][1][field_at(DEEP) + 78]));
        CHECK(isfinite(seen->mean[r][0][field_at(WIDE) + 77]));
        for (i = 0; i < FIELD_TOTAL; i++)
            if (!isfinite(seen->mean[r][2][i]) || !isfinite(seen->residual[r][i])) break;
        CHECK_MSG(i == FIELD_TOTAL, "rank %d: element %lld stays poisoned", r, (long long)i);
    }
    seen_free(seen);
}

/* ---- conservation: nothing is lost, nothing is counted twice ---- */

static void check_conserved(const field_case *c, const field_seen *seen, const char *what)
{
    int p, r, step;
    int64_t i;
    for (p = 0; p < FIELD_PARAMS; p++)
        for (i = 0; i < field_count(p) && seen->compressed[0][p]; i++) {
            const int64_t at = field_at(p) + i;
            double came = 0, gone = 0, size = 0;
            for (step = 0; step < c->steps; step++) {
                gone += (double)seen->mean[0][step][at] * c->ranks;
                for (r = 0; r < c->ranks; r++) {
                    const double g = (double)field_own(c, p, r, step, i);
                    came += g;
                    size += fabs(g);
                }
            }
            for (r = 0; r < c->ranks; r++) gone += (double)seen->residual[r][at];
            if (!(fabs(came - gone) <= 4e-6 * (size + 100))) {
                CHECK_MSG(0, "%s: \"%s\"[%lld]: gradients add up to %.9g, sent and kept are %.9g",
                          what, field_tensors[p].name, (long long)i, came, gone);
                return;
            }
        }
    CHECK(1);
}

static void check_ranks_agree(const field_case *c, const field_seen *seen, const char *what)
{
    int r, step;
    for (r = 1; r < c->ranks; r++)
        for (step = 0; step < c->steps; step++)
            if (!rows_equal(seen->mean[r][step], seen->mean[0][step], what, r, step)) return;
}

/* Large shares, as in a warm-up: where the selection is sent as a whole must not be a matter of what
 * else is in the bucket. */
static void test_large_shares(void)
{
    int i;
    for (i = 0; i < 3; i++) {
        field_case c = usual(4, DTRAIN_COMPRESSION_TOPK);
        field_seen *first, *second;
        c.how.topk_ratio = i == 0 ? 0.25f : i == 1 ? 0.55f : 0.7f;
        c.desc.bucket_bytes = 64;
        first = field_train(&c);
        c.desc.bucket_bytes = (size_t)1 << 20;
        second = field_train(&c);
        check_equal(&c, second, first, false, "large share");
        CHECK(memcmp(second->residual, first->residual, sizeof first->residual) == 0);
        check_conserved(&c, first, "large share");
        check_conserved(&c, second, "large share");
        seen_free(first);
        seen_free(second);
    }
}

/* Every element is sent when the share is everything: what was kept before, too. */
static void test_topk_everything(void)
{
    field_case c = usual(4, DTRAIN_COMPRESSION_TOPK);
    field_seen *seen;
    c.how.topk_ratio = 1;
    seen = field_train(&c);
    check_conserved(&c, seen, "all elements");
    check_ranks_agree(&c, seen, "all elements");
    seen_free(seen);
}

/* ---- casts and nodes ---- */

/* What a node's ranks make of an element, in fp32: its sum, or the mean where fp16 could not hold that. */
static float node_part(const field_case *c, int p, int first, int step, int64_t i)
{
    const int node = (int)c->desc.node_size;
    float part = field_own(c, p, first, step, i);
    int r;
    for (r = first + 1; r < first + node; r++) part += field_own(c, p, r, step, i);
    return c->desc.reduce_dtype == DTRAIN_DTYPE_F16 ? part * (1 / (float)node) : part;
}

/* Parts are rounded for the way between nodes alone and added up in the order of nodes; what arrives is
 * rounded too. */
static void oracle_nodes(const field_case *c, field_seen *t, int p, int step)
{
    const int64_t count = field_count(p), at = field_at(p);
    const int node = (int)c->desc.node_size, nodes = c->ranks / node;
    const bool means = c->desc.reduce_dtype == DTRAIN_DTYPE_F16;
    const uint32_t dtype = nodes > 1 ? c->desc.reduce_dtype : 0;
    int64_t i;
    int n;
    for (i = 0; i < count; i++) {
        float sum = rounded(dtype, node_part(c, p, 0, step, i));
        for (n = 1; n < nodes; n++) sum += rounded(dtype, node_part(c, p, n * node, step, i));
        if (means) sum *= 1 / (float)nodes;
        t->mean[0][step][at + i] = rounded(dtype, sum) * (means ? 1 : 1 / (float)c->ranks);
    }
}

static field_seen *nodes_truth(const field_case *c)
{
    field_seen *t = (field_seen *)ranks_shared(sizeof *t);
    int step, p;
    for (step = 0; step < c->steps; step++)
        for (p = 0; p < FIELD_PARAMS; p++)
            if (field_trained(p)) oracle_nodes(c, t, p, step);
    return t;
}

static void check_nodes(const field_case *c, const char *what)
{
    field_seen *truth = nodes_truth(c), *seen = field_train(c);
    check_equal(c, seen, truth, false, what);
    seen_free(truth);
    seen_free(seen);
}

static void test_cast(void)
{
    static const uint32_t dtypes[] = {DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};
    int i, ranks;
    for (ranks = 2; ranks <= 8; ranks += 3)
        for (i = 0; i < 2; i++) {
            field_case c = usual(ranks, DTRAIN_COMPRESSION_NONE);
            field_seen *truth, *seen;
            c.desc.reduce_dtype = dtypes[i];
            c.copying = i;
            truth = field_truth(&c, NULL);
            seen = field_train(&c);
            check_equal(&c, seen, truth, false, dtrain_dtype_name((dtrain_dtype)dtypes[i]));
            seen_free(truth);
            seen_free(seen);
        }
}

static void test_nodes(void)
{
    static const uint32_t dtypes[] = {0, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};
    int i, ranks, node;
    for (ranks = 2; ranks <= 8; ranks *= 2)
        for (node = 1; node <= ranks; node *= 2)
            for (i = 0; i < (node < ranks ? 3 : 1); i++) {
                field_case c = usual(ranks, DTRAIN_COMPRESSION_NONE);
                char what[60];
                c.desc.hierarchical = true;
                c.desc.node_size = (uint32_t)node;
                c.desc.reduce_dtype = dtypes[i];
                c.desc.no_overlap = i == 1;
                c.copying = (ranks + node + i) % 3;
                c.steps = 3;
                c.micro = i == 2 ? 2 : 1;
                c.mode = i ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES;
                snprintf(what, sizeof what, "%d ranks in nodes of %d, reduce_dtype %u", ranks, node,
                         dtypes[i]);
                check_nodes(&c, what);
            }
}

/* One node has no slow way: nothing is rounded, nothing is compressed. */
static void test_one_node(void)
{
    field_case c = usual(4, DTRAIN_COMPRESSION_NONE);
    c.desc.hierarchical = true;
    c.desc.node_size = 4;
    c.desc.reduce_dtype = DTRAIN_DTYPE_BF16;
    check_nodes(&c, "one node, bf16");
    c.desc.reduce_dtype = 0;
    c.how.kind = DTRAIN_COMPRESSION_TOPK;
    check_nodes(&c, "one node, top-k");
}

/* node_size 0: the nodes that the launch emulates. */
static void test_emulated_nodes(void)
{
    int i;
    for (i = 0; i < 2; i++) {
        field_case c = usual(i ? 6 : 4, DTRAIN_COMPRESSION_NONE), expected;
        field_seen *truth, *seen;
        c.desc.hierarchical = true;
        c.emulated = i ? 3 : 2;
        c.mode = i ? DTRAIN_LAUNCH_PROCESSES : DTRAIN_LAUNCH_THREADS;
        expected = c;
        expected.desc.node_size = (uint32_t)c.emulated;
        truth = nodes_truth(&expected);
        seen = field_train(&c);
        check_equal(&c, seen, truth, false, "emulated nodes");
        CHECK(seen->info[0].desc.node_size == (uint32_t)c.emulated);
        seen_free(truth);
        seen_free(seen);
    }
}

/* Strategies over half of the world's ranks. */
static void test_groups(void)
{
    int i;
    for (i = 0; i < 4; i++) {
        field_case c = usual(4, i < 2 ? DTRAIN_COMPRESSION_TOPK : DTRAIN_COMPRESSION_NONE);
        c.group = true;
        c.mode = i % 2 ? DTRAIN_LAUNCH_PROCESSES : DTRAIN_LAUNCH_THREADS;
        if (i >= 2) c.desc.hierarchical = true, c.desc.node_size = 2;
        if (i == 3) c.desc.reduce_dtype = DTRAIN_DTYPE_BF16;
        if (i < 2) check_topk(&c, "top-k in a group");
        else check_nodes(&c, "nodes in a group");
    }
}

/* Six ranks in nodes of two and of three. */
static void test_nodes_of_other_sizes(void)
{
    int node;
    for (node = 2; node <= 3; node++) {
        field_case c = usual(6, DTRAIN_COMPRESSION_NONE);
        c.desc.hierarchical = true;
        c.desc.node_size = (uint32_t)node;
        check_nodes(&c, "six ranks");
        c.desc.bucket_bytes = 64;
        c.shuffle = true;
        check_nodes(&c, "six ranks, small buckets");
        c.desc.reduce_dtype = node == 2 ? DTRAIN_DTYPE_BF16 : DTRAIN_DTYPE_F16;
        check_nodes(&c, "six ranks, 16 bits");
    }
}

/* Gradients whose mean fp16 can hold, and whose sum it cannot. */
static void test_nodes_in_range(void)
{
    int i, step;
    int64_t k;
    for (i = 0; i < 2; i++) {
        field_case c = usual(8, DTRAIN_COMPRESSION_NONE);
        field_seen *seen;
        c.factor = 3000;
        c.desc.reduce_dtype = DTRAIN_DTYPE_F16;
        if (i) c.desc.hierarchical = true, c.desc.node_size = 2;
        seen = field_train(&c);
        for (step = 0; step < c.steps; step++) {
            for (k = 0; k < FIELD_TOTAL; k++)
                if (!isfinite(seen->mean[0][step][k])) break;
            CHECK_MSG(k == FIELD_TOTAL, "%s: a mean of finite gradients is %g",
                      i ? "nodes" : "flat", (double)seen->mean[0][step][k % FIELD_TOTAL]);
        }
        seen_free(seen);
    }
}

/* Top-k between nodes: a rank sends the largest of its piece of its node's sum. */
static field_seen *topk_nodes_truth(const field_case *c, const field_seen *seen)
{
    field_seen *t = (field_seen *)ranks_shared(sizeof *t);
    const int node = (int)c->desc.node_size;
    const bool means = c->desc.reduce_dtype == DTRAIN_DTYPE_F16;
    const float share = means ? 1 / (float)(c->ranks / node) : 1 / (float)c->ranks;
    float x[2000];
    int64_t places[2000], i, k;
    int step, p, r;
    for (step = 0; step < c->steps; step++)
        for (p = 0; p < FIELD_PARAMS; p++) {
            const bool dense = !topk_compresses(c, p) || (uint64_t)step < c->how.dense_steps;
            if (dense && field_trained(p)) oracle_nodes(c, t, p, step);
            for (r = 0; r < c->ranks && !dense; r++) {
                const int64_t first = seen->first[r][p], count = seen->pieces[r][p];
                const int64_t at = field_at(p) + first;
                const int start = r / node * node;
                if (!count) continue;
                for (i = 0; i < count; i++) x[i] = node_part(c, p, start, step, first + i);
                keep(&c->how, t->residual[r] + at, t->velocity[r] + at, x, count);
                k = topk_count(topk_ratio_at(&c->how, step), count);
                largest(t->residual[r] + at, count, k, places);
                for (i = 0; i < k; i++) {
                    float *residual = &t->residual[r][at + places[i]];
                    const float sent = rounded(c->desc.reduce_dtype, *residual);
                    volatile float part = share * sent;
                    t->mean[0][step][at + places[i]] += part;
                    t->velocity[r][at + places[i]] = 0;
                    *residual -= sent;
                }
            }
        }
    return t;
}

/* The pieces of a node's ranks are the tensor, and those of one place in all nodes are the same. */
static void check_pieces(const field_case *c, const field_seen *seen)
{
    const int node = (int)c->desc.node_size;
    int p, r, k;
    for (p = 0; p < FIELD_PARAMS; p++) {
        if (!topk_compresses(c, p)) continue;
        for (r = 0; r < c->ranks; r++)
            CHECK(seen->first[r][p] == seen->first[r % node][p] &&
                  seen->pieces[r][p] == seen->pieces[r % node][p]);
        for (r = 0; r < c->ranks; r += node) {
            int64_t sum = 0;
            for (k = r; k < r + node; k++) sum += seen->pieces[k][p];
            CHECK_MSG(sum == field_count(p), "\"%s\": pieces of %lld elements of %lld",
                      field_tensors[p].name, (long long)sum, (long long)field_count(p));
        }
    }
}

static void test_topk_between_nodes(void)
{
    static const int sizes[][2] = {{4, 2}, {8, 2}, {8, 4}, {6, 3}, {4, 1}};
    int i;
    for (i = 0; i < 10; i++) {
        field_case c = usual(sizes[i % 5][0], DTRAIN_COMPRESSION_TOPK);
        field_seen *seen, *truth;
        c.desc.hierarchical = true;
        c.desc.node_size = (uint32_t)sizes[i % 5][1];
        c.how.topk_momentum = i >= 5 ? 0.5f : 0;
        c.desc.bucket_bytes = i % 2 ? 3000 : 9000;
        c.desc.no_overlap = i == 3;
        c.how.dense_steps = i == 4 || i == 7 ? 2 : 0;
        c.desc.reduce_dtype = i == 2 || i == 6 ? DTRAIN_DTYPE_BF16 : i == 8 ? DTRAIN_DTYPE_F16 : 0;
        seen = field_train(&c);
        check_pieces(&c, seen);
        truth = topk_nodes_truth(&c, seen);
        check_equal(&c, seen, truth, true, "top-k between nodes");
        seen_free(truth);
        seen_free(seen);
    }
}

/* ---- trainings under nodes ---- */

enum { NODE_CASES = 24 };

typedef struct node_matrix {
    int count;
    strategy_case cases[NODE_CASES];
    strategy_outcome out[NODE_CASES];
} node_matrix;

static int node_matrix_rank(dtrain_world *world, void *user)
{
    node_matrix *m = (node_matrix *)user;
    int i;
    for (i = 0; i < m->count; i++) {
        const dtrain_result result = strategy_train(world, &m->cases[i], &m->out[i]);
        if (!CHECK_MSG(result == DTRAIN_OK, "%s: rank %d: %s",
                       strategy_case_name(&m->cases[i], dtrain_world_size(world)).text,
                       dtrain_world_rank(world), dtrain_last_error()))
            return 1;
    }
    return 0;
}

static const uint32_t node_kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_ZERO1,
                                      DTRAIN_STRATEGY_SHARD_GRAD_OP, DTRAIN_STRATEGY_FULL_SHARD};

/* Every kind that can be hierarchical, with and without micro-batches: the bits of the others, and
 * the numbers of one rank on the whole batch. */
static void check_node_kinds(int ranks, int node, uint32_t mode, uint32_t reduce_dtype,
                             double tolerance)
{
    node_matrix *m = (node_matrix *)ranks_shared(sizeof *m);
    node_matrix *one = (node_matrix *)ranks_shared(sizeof *one);
    int i;
    for (i = 0; i < 12; i++) {
        strategy_case *c = &m->cases[m->count++];
        c->kind = node_kinds[i / 3];
        c->micro = i % 3 ? 4 : 1;
        c->accumulation = i % 3 == 1 ? DTRAIN_ACCUMULATION_LAST : DTRAIN_ACCUMULATION_DEFAULT;
        snprintf(c->group, sizeof c->group, "%s",
                 i % 3 == 0                                       ? "once"
                 : i % 3 == 1 || c->kind <= DTRAIN_STRATEGY_ZERO1 ? "last"
                                                                  : "every");
        c->optimizer = DTRAIN_OPTIMIZER_ADAMW;
        c->hierarchical = true;
        c->node_size = (uint32_t)node;
        c->reduce_dtype = reduce_dtype;
        c->no_overlap = i == 4 || i == 10;
    }
    one->count = 1;
    one->cases[0].kind = DTRAIN_STRATEGY_DDP, one->cases[0].micro = 1;
    one->cases[0].optimizer = DTRAIN_OPTIMIZER_ADAMW;
    ranks_run(ranks, mode, node_matrix_rank, m);
    ranks_run(1, mode, node_matrix_rank, one);
    for (i = 0; i < m->count; i++) {
        const strategy_name name = strategy_case_name(&m->cases[i], ranks);
        int k = 0;
        while (strcmp(m->cases[k].group, m->cases[i].group) != 0) k++;
        strategy_check_ranks(&m->out[i], ranks, name.text);
        strategy_check_shards(&m->cases[i], &m->out[i], ranks, name.text);
        strategy_check_bits(&m->out[i], &m->out[k], name.text);
        strategy_check_close(&m->out[i], ranks, &one->out[0], 1, tolerance, name.text);
    }
    munmap(m, sizeof *m);
    munmap(one, sizeof *one);
}

static void test_node_kinds_2_ranks(void)
{
    check_node_kinds(2, 1, DTRAIN_LAUNCH_THREADS, 0, 2e-6);
    check_node_kinds(2, 2, DTRAIN_LAUNCH_PROCESSES, 0, 2e-6);
}

static void test_node_kinds_4_ranks(void)
{
    int node;
    for (node = 1; node <= 4; node *= 2)
        check_node_kinds(4, node, DTRAIN_LAUNCH_PROCESSES, 0, 2e-6);
}

static void test_node_kinds_8_ranks(void)
{
    check_node_kinds(8, 2, DTRAIN_LAUNCH_PROCESSES, 0, 2e-6);
    check_node_kinds(8, 4, DTRAIN_LAUNCH_THREADS, 0, 2e-6);
    if (test_full()) {
        check_node_kinds(8, 1, DTRAIN_LAUNCH_PROCESSES, 0, 2e-6);
        check_node_kinds(8, 8, DTRAIN_LAUNCH_PROCESSES, 0, 2e-6);
    }
}

static void test_node_kinds_6_ranks_of_3(void)
{
    check_node_kinds(6, 3, DTRAIN_LAUNCH_THREADS, 0, 2e-6);
}

static void test_node_kinds_bf16(void)
{
    check_node_kinds(4, 2, DTRAIN_LAUNCH_THREADS, DTRAIN_DTYPE_BF16, 4e-3);
    check_node_kinds(4, 2, DTRAIN_LAUNCH_THREADS, DTRAIN_DTYPE_F16, 1e-3);
}

/* Whole gradients and one slow link: 2 (R-1)/R of 1/G between nodes is what the wire carries there; without levels
 * each of 8 ranks sends half of what it has to 4 of its 7 peers. */
static void test_node_bytes(void)
{
    field_case c = usual(8, DTRAIN_COMPRESSION_NONE);
    field_seen *seen;
    double all, expected, away;
    int r;
    c.emulated = 4;
    for (int levels = 0; levels < 2; levels++) {
        c.desc.hierarchical = levels > 0;
        c.desc.node_size = levels ? 4 : 0;
        seen = field_train(&c);
        all = (double)seen->info[0].bucket_bytes;
        away = levels ? 2 * 1 / 2.0 * all / 4 : 2 * 4 / 8.0 * all;
        expected = levels ? 2 * 3 / 4.0 * all + away : 2 * 7 / 8.0 * all; /* inside, and across */
        for (r = 0; r < 8; r++) {
            CHECK_MSG(fabs((double)seen->last[r].wire_bytes / expected - 1) < 0.05,
                      "%llu bytes a step, %.0f expected",
                      (unsigned long long)seen->last[r].wire_bytes, expected);
            CHECK_MSG(fabs((double)seen->last[r].node_bytes / away - 1) < 0.05,
                      "%llu bytes to other nodes, %.0f expected",
                      (unsigned long long)seen->last[r].node_bytes, away);
        }
        if (!levels) seen_free(seen);
    }
    seen_free(seen);
}

/* ---- squares: four equal matrices, for everything that is not about numbers ---- */

enum { SQUARES = 4, SIDE = 40, SQUARE = SIDE * SIDE };

typedef struct squares {
    dtrain_param params[SQUARES];
    float values[SQUARES][SQUARE];
} squares;

static void squares_init(squares *m)
{
    static const char *const names[SQUARES] = {"s0", "s1", "s2", "s3"};
    int i;
    memset(m, 0, sizeof *m);
    for (i = 0; i < SQUARES; i++) {
        m->params[i] = ranks_param(names[i], m->values[i], NULL, SIDE, SIDE);
        m->params[i].unit = (uint32_t)i;
    }
}

static dtrain_result squares_step(squares *m, dtrain_strategy *s, int rank, int step)
{
    int p;
    int64_t i;
    for (p = SQUARES - 1; p >= 0; p--) {
        for (i = 0; i < SQUARE; i++)
            m->params[p].grad[i] = field_noise(field_mix(p, rank, step, 0, i));
        TRY(dtrain_strategy_ready(s, (size_t)p));
    }
    return dtrain_strategy_finish(s);
}

/* A hash of all gradients. */
static uint64_t squares_hash(const squares *m)
{
    uint64_t hash = DTRAIN__FNV_BASIS;
    int p;
    for (p = 0; p < SQUARES; p++)
        hash = dtrain__fnv1a(hash, m->params[p].grad, sizeof m->values[p]);
    return hash;
}

typedef struct settings {
    dtrain_strategy_desc base;
    dtrain_compression_desc how;
} settings;

static dtrain_result settings_create(dtrain_world *world, dtrain_param *params, size_t count,
                                     const settings *desc, dtrain_strategy **strategy)
{
    dtrain_strategy_desc base = desc->base;
    base.compression = &desc->how;
    return dtrain_strategy_create(world, params, count, &base, strategy);
}

static settings squares_desc(uint32_t compression)
{
    settings desc;
    memset(&desc, 0, sizeof desc);
    desc.how.kind = compression;
    desc.how.dense_steps = 1;
    desc.how.topk_ratio = 0.01f;
    desc.base.bucket_bytes = 7000;
    return desc;
}

/* The forms of the exchange that the tests below go through. */
enum { METHODS = 3 };
static settings method_desc(int method)
{
    settings desc = squares_desc(method == 1 ? DTRAIN_COMPRESSION_NONE : DTRAIN_COMPRESSION_TOPK);
    desc.base.hierarchical = method >= 1;
    desc.base.node_size = method >= 1 ? 2 : 0;
    if (method == 2) desc.how.topk_momentum = 0.5f;
    return desc;
}
static const char *const method_names[METHODS] = {"top-k", "nodes", "top-k between nodes"};

/* ---- bytes ---- */

typedef struct bytes_run {
    settings desc;
    uint64_t bytes[FIELD_RANKS];
} bytes_run;

static int bytes_rank(dtrain_world *world, void *user)
{
    bytes_run *run = (bytes_run *)user;
    const int rank = dtrain_world_rank(world);
    squares *m = (squares *)malloc(sizeof *m);
    dtrain_comm_info before, after;
    dtrain_strategy *s;
    int step;
    squares_init(m);
    RANKS_TRY(settings_create(world, m->params, SQUARES, &run->desc, &s));
    for (step = 0; step < 4; step++) {
        before = strategy_sent(s);
        RANKS_TRY(squares_step(m, s, rank, step));
        after = strategy_sent(s);
    }
    run->bytes[rank] = after.wire_bytes - before.wire_bytes;
    dtrain_strategy_destroy(s);
    free(m);
    return 0;
}

/* Of 1600 elements 16 travel, as a value and an index: 128 bytes of a tensor. */
static void test_bytes(void)
{
    static const int sizes[] = {2, 4, 8};
    const double selection = SQUARES * 16 * 8;
    int i, r;
    for (i = 0; i < 6; i++) {
        bytes_run *run = (bytes_run *)ranks_shared(sizeof *run);
        const int ranks = sizes[i % 3], method = i / 3;
        double most = (ranks - 1) * selection, least = 0.99 * most;
        run->desc = method_desc(method);
        if (method == 1) { /* half of it inside, half of the other half across */
            most = SQUARES * SQUARE * 4.0 * (1 + (ranks - 2.0) / ranks);
            least = 0.98 * most;
        }
        ranks_run(ranks, DTRAIN_LAUNCH_THREADS, bytes_rank, run);
        for (r = 0; r < ranks; r++) {
            CHECK_MSG((double)run->bytes[r] <= 1.02 * most + 300 &&
                          (double)run->bytes[r] >= least - 300,
                      "%s, %d ranks: %llu bytes, expected %.0f to %.0f", method_names[method],
                      ranks, (unsigned long long)run->bytes[r], least, most);
        }
        munmap(run, sizeof *run);
    }
}

/* ---- refusals ---- */

/* A call that must fail, with one of the codes of wrong settings and a sentence with both words. */
static void refused(dtrain_result result, const char *what, const char *word, const char *other)
{
    const char *text = result == DTRAIN_OK ? "" : dtrain_last_error();
    CHECK_MSG((result == DTRAIN_ERROR_ARGUMENT || result == DTRAIN_ERROR_UNSUPPORTED) &&
                  strstr(text, word) && strstr(text, other),
              "%s: expected a refusal with \"%s\" and \"%s\", found %s: %s", what, word, other,
              dtrain_result_text(result), text);
}

static dtrain_result try_create(dtrain_world *world, const settings *desc)
{
    dtrain_param params[2];
    dtrain_strategy *strategy;
    dtrain_result result;
    params[0] = ranks_param("first", NULL, NULL, SIDE, SIDE);
    params[1] = ranks_param("second", NULL, NULL, 3, 0);
    result = settings_create(world, params, 2, desc, &strategy);
    CHECK((result == DTRAIN_OK) == (strategy != NULL));
    dtrain_strategy_destroy(strategy);
    return result;
}

static void refuse_numbers(dtrain_world *world)
{
    static const float ratios[] = {-0.1f, 1.5f, NAN, INFINITY};
    static const float momenta[] = {-0.1f, 1, 1.5f, NAN};
    settings desc;
    int i;
    for (i = 0; i < 4; i++) {
        desc = squares_desc(DTRAIN_COMPRESSION_TOPK), desc.how.topk_ratio = ratios[i];
        refused(try_create(world, &desc), "ratio", "topk_ratio", "");
        desc = squares_desc(DTRAIN_COMPRESSION_TOPK), desc.how.warmup_ratio = ratios[i],
        desc.how.warmup_steps = 5;
        refused(try_create(world, &desc), "warm-up", "warmup_ratio", "");
    }
    for (i = 0; i < 4; i++) {
        desc = squares_desc(DTRAIN_COMPRESSION_TOPK), desc.how.topk_momentum = momenta[i];
        refused(try_create(world, &desc), "momentum", "topk_momentum", "");
    }
    for (i = 0; i < 2; i++) { /* fields of top-k without top-k */
        desc = squares_desc(DTRAIN_COMPRESSION_NONE);
        if (i == 0) desc.how.topk_momentum = 0.5f;
        else desc.how.no_error_feedback = true;
        refused(try_create(world, &desc), "not top-k",
                i == 0 ? "topk_momentum" : "no_error_feedback", "compression");
    }
    desc = squares_desc(DTRAIN_COMPRESSION_TOPK), desc.how.topk_momentum = 0.5f,
    desc.how.no_error_feedback = true;
    refused(try_create(world, &desc), "velocity of nothing", "topk_momentum", "no_error_feedback");
    desc = squares_desc(DTRAIN_COMPRESSION_TOPK), desc.how.warmup_steps = 3,
    desc.how.warmup_ratio = 0.001f;
    refused(try_create(world, &desc), "warm-up that rises", "warmup_ratio", "topk_ratio");
    desc = squares_desc(DTRAIN_COMPRESSION_TOPK), desc.how.dense_below = -1;
    refused(try_create(world, &desc), "dense_below", "dense_below", "-1");
    desc = squares_desc(2);
    refused(try_create(world, &desc), "compression 2", "compression", "2");
}

static int refuse_rank(dtrain_world *world, void *user)
{
    settings desc;
    uint32_t kind;
    int i;
    (void)user;
    for (kind = DTRAIN_STRATEGY_ZERO1; kind <= DTRAIN_STRATEGY_HYBRID_SHARD; kind++) {
        desc = squares_desc(DTRAIN_COMPRESSION_TOPK), desc.base.kind = kind;
        desc.base.node_size = kind == DTRAIN_STRATEGY_HYBRID_SHARD ? 2 : 0;
        refused(try_create(world, &desc), "compression of shards", "compression",
                strategy_kind_name(kind));
    }
    desc = squares_desc(DTRAIN_COMPRESSION_TOPK), desc.base.kind = DTRAIN_STRATEGY_AUTO;
    refused(try_create(world, &desc), "AUTO", "AUTO", "");
    desc = squares_desc(DTRAIN_COMPRESSION_TOPK),
    desc.base.accumulation = DTRAIN_ACCUMULATION_EVERY;
    refused(try_create(world, &desc), "every micro-batch", "ACCUMULATION_EVERY", "ddp");
    for (kind = DTRAIN_STRATEGY_ZERO3; kind <= DTRAIN_STRATEGY_HYBRID_SHARD; kind++) {
        memset(&desc, 0, sizeof desc), desc.base.kind = kind, desc.base.hierarchical = true;
        desc.base.node_size = 2;
        refused(try_create(world, &desc), "hierarchical", "hierarchical", strategy_kind_name(kind));
    }
    for (i = 3; i <= 8; i += 5) {
        memset(&desc, 0, sizeof desc), desc.base.hierarchical = true,
                                       desc.base.node_size = (uint32_t)i;
        refused(try_create(world, &desc), "node_size", "node_size", i == 3 ? "3" : "8");
    }
    refuse_numbers(world);
    desc = squares_desc(DTRAIN_COMPRESSION_TOPK);
    RANKS_TRY(try_create(world, &desc)); /* the communicator is as good as before */
    return 0;
}

static void test_refused_settings(void)
{
    ranks_run(4, DTRAIN_LAUNCH_THREADS, refuse_rank, NULL);
    ranks_run(4, DTRAIN_LAUNCH_PROCESSES, refuse_rank, NULL);
}

static dtrain_tensor *no_loss(dtrain_tape *tape, void *user)
{
    (void)user;
    return dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 0, NULL, NULL, false);
}

/* Residuals are of the scale of the steps they come from: none may change under them. */
static int scaling_rank(dtrain_world *world, void *user)
{
    int i;
    (void)user;
    for (i = 0; i < 2; i++) {
        const dtrain_optimizer_desc sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
        settings desc = squares_desc(DTRAIN_COMPRESSION_TOPK);
        dtrain_trainer_desc trainer_desc;
        dtrain_trainer *trainer = NULL;
        dtrain_optimizer *optimizer;
        dtrain_strategy *s;
        squares *m = (squares *)malloc(sizeof *m);
        squares_init(m);
        RANKS_TRY(settings_create(world, m->params, SQUARES, &desc, &s));
        RANKS_TRY(dtrain_optimizer_create(world, s, &sgd, &optimizer));
        memset(&trainer_desc, 0, sizeof trainer_desc);
        trainer_desc.strategy = s, trainer_desc.optimizer = optimizer, trainer_desc.loss = no_loss;
        trainer_desc.schedule.lr = 1;
        if (i == 0) trainer_desc.tape_flags = DTRAIN_TAPE_F16;
        else trainer_desc.loss_scaling.scale = 65536;
        refused(dtrain_trainer_create(world, &trainer_desc, &trainer), "loss scaling",
                i == 0 ? "DTRAIN_TAPE_F16" : "loss_scaling", "compresses");
        CHECK(trainer == NULL);
        dtrain_trainer_destroy(trainer);
        dtrain_optimizer_destroy(optimizer);
        dtrain_strategy_destroy(s);
        free(m);
    }
    return 0;
}

static void test_loss_scaling_is_refused(void)
{
    ranks_run(2, DTRAIN_LAUNCH_THREADS, scaling_rank, NULL);
}

/* ---- ranks that disagree ---- */

enum { DISPUTES = 11 };

static const char *dispute_desc(settings *desc, int which)
{
    *desc = squares_desc(DTRAIN_COMPRESSION_TOPK);
    switch (which) {
    case 0: desc->how.topk_ratio = 0.02f; return "topk_ratio";
    case 1: desc->how.kind = DTRAIN_COMPRESSION_NONE; return "compression";
    case 2: desc->base.bucket_bytes = 9000; return "bucket_bytes";
    case 3: desc->how.dense_steps = 7; return "dense_steps";
    case 4: desc->how.warmup_steps = 3; return "warmup_steps";
    case 5: desc->how.dense_below = 17; return "dense_below";
    case 6: desc->how.topk_momentum = 0.5f; return "topk_momentum";
    case 7: desc->how.no_error_feedback = true; return "no_error_feedback";
    case 8: desc->how.warmup_ratio = 0.5f; return "warmup_ratio";
    case 9: desc->base.hierarchical = true, desc->base.node_size = 2; return "hierarchical";
    default: desc->base.hierarchical = true, desc->base.node_size = 1; return "node_size";
    }
}

static int dispute_rank(dtrain_world *world, void *user)
{
    int which;
    (void)user;
    for (which = 0; which < DISPUTES; which++) {
        settings desc;
        const char *field = dispute_desc(&desc, which);
        dtrain_result result;
        if (dtrain_world_rank(world) != which % 4) {
            desc = squares_desc(DTRAIN_COMPRESSION_TOPK);
            if (which == 10) desc.base.hierarchical = true, desc.base.node_size = 2;
            if (which == 8) desc.how.warmup_steps = 4;
        } else if (which == 8) desc.how.warmup_steps = 4;
        result = try_create(world, &desc);
        CHECK_MSG(result == DTRAIN_ERROR_MISMATCH && strstr(dtrain_last_error(), field) &&
                      strstr(dtrain_last_error(), "rank"),
                  "rank %d: another %s: %s: %s", dtrain_world_rank(world), field,
                  dtrain_result_text(result), result == DTRAIN_OK ? "" : dtrain_last_error());
    }
    return 0;
}

static void test_ranks_disagree(void)
{
    ranks_run(4, DTRAIN_LAUNCH_THREADS, dispute_rank, NULL);
    ranks_run(4, DTRAIN_LAUNCH_PROCESSES, dispute_rank, NULL);
}

/* ---- state: what is kept can be copied out and in ---- */

enum { STATE_STEPS = 6, STATE_HALF = 3 };

typedef struct state_run {
    int method;
    uint64_t whole[FIELD_RANKS][STATE_STEPS], halves[FIELD_RANKS][STATE_STEPS];
} state_run;

/* Copies every tensor of state to or from `store`; elements copied. */
static int64_t state_copy(dtrain_strategy *s, float *store, bool out)
{
    const dtrain__kept *states;
    size_t count, i, k;
    int64_t all = 0;
    states = dtrain__kept_of(s, &count);
    CHECK(count > 0 && count <= SQUARES);
    for (i = 0; i < count; i++) { /* their order is that of buckets: every tensor has its place */
        int64_t at = (int64_t)states[i].param->state.index * 2 * SQUARE;
        float *const parts[2] = {states[i].residual, states[i].velocity};
        const size_t bytes = (size_t)states[i].count * sizeof *store;
        for (k = 0; k < 2; k++) {
            if (!parts[k]) continue;
            if (out) memcpy(store + at, parts[k], bytes);
            else memcpy(parts[k], store + at, bytes);
            at += states[i].count;
            all += states[i].count;
        }
    }
    return all;
}

static int state_rank(dtrain_world *world, void *user)
{
    state_run *run = (state_run *)user;
    const int rank = dtrain_world_rank(world);
    settings desc = method_desc(run->method);
    float *store = (float *)malloc(2 * sizeof(float) * SQUARES * SQUARE);
    squares *m = (squares *)malloc(sizeof *m);
    dtrain_strategy *s;
    int part, step;
    int64_t copied = 0;
    desc.how.dense_steps = DTRAIN_DENSE_STEPS_NONE;
    for (part = 0; part < 3;
         part++) { /* all steps; the first half; the second, with other buckets */
        if (part == 2 && !desc.base.hierarchical) /* there buckets say which piece is whose */
            desc.base.bucket_bytes = (size_t)1 << 20;
        squares_init(m);
        RANKS_TRY(settings_create(world, m->params, SQUARES, &desc, &s));
        if (part == 2) CHECK(state_copy(s, store, false) == copied);
        for (step = part == 2 ? STATE_HALF : 0; step < (part == 1 ? STATE_HALF : STATE_STEPS);
             step++) {
            RANKS_TRY(squares_step(m, s, rank, step));
            (part ? run->halves : run->whole)[rank][step] = squares_hash(m);
        }
        if (part == 1) copied = state_copy(s, store, true);
        dtrain_strategy_destroy(s);
    }
    CHECK(copied > 0);
    free(m);
    free(store);
    return 0;
}

static void test_state(void)
{
    int method, r;
    for (method = 0; method < METHODS; method++) {
        state_run *run = (state_run *)ranks_shared(sizeof *run);
        run->method = method;
        if (method == 1) continue;
        ranks_run(4, DTRAIN_LAUNCH_PROCESSES, state_rank, run);
        for (r = 0; r < 4; r++) {
            CHECK(run->whole[r][0] != run->whole[r][5]);
            CHECK_MSG(memcmp(run->halves[r], run->whole[r], sizeof run->whole[r]) == 0,
                      "%s: rank %d goes on otherwise with copied state", method_names[method], r);
        }
        munmap(run, sizeof *run);
    }
}

/* No compression, no state. */
static int stateless_rank(dtrain_world *world, void *user)
{
    settings desc = squares_desc(DTRAIN_COMPRESSION_NONE);
    dtrain_strategy_info info;
    dtrain_strategy *s;
    squares *m = (squares *)malloc(sizeof *m);
    size_t count = 7;
    int kind;
    (void)user;
    for (kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_ZERO1; kind++) {
        squares_init(m);
        desc.base.kind = (uint32_t)kind;
        RANKS_TRY(settings_create(world, m->params, SQUARES, &desc, &s));
        (void)dtrain__kept_of(s, &count);
        dtrain_strategy_query(s, &info);
        CHECK(count == 0 && info.state_bytes == 0);
        dtrain_strategy_destroy(s);
    }
    free(m);
    return 0;
}

static void test_no_state(void) { ranks_run(2, DTRAIN_LAUNCH_THREADS, stateless_rank, NULL); }

/* ---- memory ---- */

typedef struct tracked {
    counted_memory memory;
    int method;
} tracked;

static dtrain_launch_desc tracked_launch(tracked *t, int method)
{
    dtrain_launch_desc desc = ranks_desc(4, DTRAIN_LAUNCH_THREADS);
    t->method = method;
    memset(&t->memory, 0, sizeof t->memory);
    desc.options.allocator = counted_allocator(&t->memory);
    return desc;
}

/* From the first compressed step on nothing is allocated and nothing moves. */
static int steady_rank(dtrain_world *world, void *user)
{
    tracked *t = (tracked *)user;
    settings desc = method_desc(t->method);
    const dtrain__kept *states;
    dtrain_strategy *s;
    squares *m = (squares *)malloc(sizeof *m);
    const float *grads[SQUARES], *residuals[SQUARES] = {NULL};
    size_t count, k;
    long calls = 0;
    int step, p;
    squares_init(m);
    desc.how.warmup_steps = desc.how.kind == DTRAIN_COMPRESSION_TOPK ? 2 : 0;
    RANKS_TRY(settings_create(world, m->params, SQUARES, &desc, &s));
    for (step = 0; step < 6; step++) {
        RANKS_TRY(squares_step(m, s, dtrain_world_rank(world), step));
        RANKS_TRY(dtrain_strategy_publish(s));
        states = dtrain__kept_of(s, &count);
        for (k = 0; k < count; k++) {
            CHECK(step < 2 || residuals[k] == states[k].residual);
            residuals[k] = states[k].residual;
        }
        for (p = 0; p < SQUARES; p++) {
            CHECK(step < 2 || grads[p] == m->params[p].grad);
            grads[p] = m->params[p].grad;
        }
        RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
        if (step == 1) calls = __atomic_load_n(&t->memory.calls, __ATOMIC_ACQUIRE);
        RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
    }
    CHECK_MSG(__atomic_load_n(&t->memory.calls, __ATOMIC_ACQUIRE) == calls,
              "%s: %ld allocations after the first compressed step", method_names[t->method],
              t->memory.calls - calls);
    dtrain_strategy_destroy(s);
    free(m);
    return 0;
}

static void test_steady_state(void)
{
    int method;
    for (method = 0; method < METHODS; method++) {
        tracked t;
        dtrain_launch_desc desc = tracked_launch(&t, method);
        CHECK_MSG(ranks_launch(&desc, steady_rank, &t, NULL) == DTRAIN_OK, "%s",
                  dtrain_last_error());
        CHECK(t.memory.live == 0 && t.memory.wrong == 0);
    }
}

/* No checks inside: most runs fail, and must only end and give everything back. */
static int tracked_rank(dtrain_world *world, void *user)
{
    const tracked *t = (const tracked *)user;
    settings desc = method_desc(t->method);
    dtrain_strategy *s = NULL;
    int step, bad;
    squares *m = (squares *)malloc(sizeof *m);
    squares_init(m);
    bad = settings_create(world, m->params, SQUARES, &desc, &s) != DTRAIN_OK;
    for (step = 0; step < 3 && !bad; step++)
        bad = squares_step(m, s, dtrain_world_rank(world), step) != DTRAIN_OK;
    dtrain_strategy_destroy(s);
    free(m);
    return bad;
}

static void check_allocation_failures(int method)
{
    tracked t;
    int n;
    for (n = 1; n < 600; n++) {
        dtrain_launch_desc desc = tracked_launch(&t, method);
        dtrain_result result;
        t.memory.fail_at = n;
        result = dtrain_launch(&desc, tracked_rank, &t, NULL);
        CHECK_MSG(t.memory.live == 0 && t.memory.live_bytes == 0,
                  "%s: call %d fails: %ld blocks, %ld bytes leak", method_names[method], n,
                  t.memory.live, t.memory.live_bytes);
        CHECK_MSG((result == DTRAIN_OK) == (t.memory.calls < n), "%s: call %d of %ld fails: %s",
                  method_names[method], n, t.memory.calls, dtrain_result_text(result));
        if (t.memory.calls < n) break;
    }
    CHECK_MSG(n > 20 && n < 600, "%d allocations", n);
}

static void test_allocation_failures(void)
{
    int method;
    for (method = 0; method < METHODS; method++) check_allocation_failures(method);
}

/* What is foretold is what is there. */
static int plan_rank(dtrain_world *world, void *user)
{
    int method;
    (void)user;
    for (method = 0; method < METHODS; method++) {
        const settings desc = method_desc(method);
        dtrain_strategy_desc base = desc.base;
        const uint64_t device_before = dtrain_world_device(world)->allocated_bytes;
        uint64_t said, is;
        dtrain_strategy_info info;
        dtrain_memory plan;
        dtrain_strategy *s;
        squares *m = (squares *)malloc(sizeof *m);
        squares_init(m);
        base.compression = &desc.how;
        RANKS_TRY(dtrain_strategy_plan(m->params, SQUARES, &base, 4, &plan));
        squares_init(m);
        RANKS_TRY(settings_create(world, m->params, SQUARES, &desc, &s));
        dtrain_strategy_query(s, &info);
        is = info.value_bytes + info.grad_bytes + info.buffer_bytes; /* state is in buffers */
        said = plan.params + plan.grads + plan.buffers;
        CHECK_MSG(said == is && plan.total == said + plan.optimizer,
                  "%s: %llu bytes planned, %llu are (values %llu, gradients %llu, buffers %llu, "
                  "state %llu)",
                  method_names[method], (unsigned long long)said, (unsigned long long)is,
                  (unsigned long long)info.value_bytes, (unsigned long long)info.grad_bytes,
                  (unsigned long long)info.buffer_bytes, (unsigned long long)info.state_bytes);
        if (method != 1) {
            const uint64_t least = (uint64_t)SQUARES * SQUARE * 4 / (method == 2 ? 2 : 1);
            CHECK_MSG(info.state_bytes >= least * (method == 2 ? 2 : 1) &&
                          info.state_bytes <= 2 * least + 4096,
                      "%s: %llu bytes of state", method_names[method],
                      (unsigned long long)info.state_bytes);
        }
        CHECK(dtrain_world_device(world)->allocated_bytes - device_before <= is);
        dtrain_strategy_destroy(s);
        CHECK(dtrain_world_device(world)->allocated_bytes == device_before);
        free(m);
    }
    return 0;
}

static void test_plan(void) { ranks_run(4, DTRAIN_LAUNCH_THREADS, plan_rank, NULL); }

/* ---- deaths ---- */

typedef struct death {
    int method, victim, step, param; /* dies before it marks the tensor */
    long after_us;                   /* or after so long, when it is not 0 */
    dtrain_result result[FIELD_RANKS];
    char text[FIELD_RANKS][1024];
    double seconds[FIELD_RANKS], died;
} death;

static void die_now(int number)
{
    (void)number;
    kill(getpid(), SIGKILL);
}

static void die_after(long us)
{
    struct itimerval timer;
    memset(&timer, 0, sizeof timer);
    signal(SIGALRM, die_now);
    timer.it_value.tv_sec = us / 1000000;
    timer.it_value.tv_usec = us % 1000000 ? us % 1000000 : 1;
    setitimer(ITIMER_REAL, &timer, NULL);
}

static dtrain_result death_step(const death *d, squares *m, dtrain_strategy *s, int rank, int step)
{
    int p;
    for (p = SQUARES - 1; p >= 0; p--) {
        if (rank == d->victim && !d->after_us && step == d->step && p == d->param)
            kill(getpid(), SIGKILL);
        m->params[p].grad[step % SQUARE] = (float)(rank + p);
        TRY(dtrain_strategy_ready(s, (size_t)p));
    }
    return dtrain_strategy_finish(s);
}

static int death_rank(dtrain_world *world, void *user)
{
    death *d = (death *)user;
    const int rank = dtrain_world_rank(world);
    const settings desc = method_desc(d->method);
    dtrain_result result = DTRAIN_OK;
    dtrain_strategy *s;
    squares *m = (squares *)malloc(sizeof *m);
    double start;
    int step;
    squares_init(m);
    RANKS_TRY(settings_create(world, m->params, SQUARES, &desc, &s));
    start = dtrain_seconds();
    if (rank == d->victim && d->after_us) die_after(d->after_us);
    for (step = 0; result == DTRAIN_OK; step++) result = death_step(d, m, s, rank, step);
    d->seconds[rank] = dtrain_seconds() - start;
    d->result[rank] = result;
    snprintf(d->text[rank], sizeof d->text[rank], "%s", dtrain_last_error());
    dtrain_strategy_destroy(s);
    free(m);
    return 40;
}

static void check_death(int method, int seed)
{
    death *d = (death *)ranks_shared(sizeof *d);
    dtrain_launch_desc desc = ranks_desc(4, DTRAIN_LAUNCH_PROCESSES);
    char name[16];
    int r;
    d->method = method;
    d->victim = seed % 4;
    d->step = seed % 3;
    d->param = (seed + method) % SQUARES;
    d->after_us = seed % 2 ? 300 + (long)(ranks_mix((uint64_t)(seed * 10 + method)) % 20000) : 0;
    snprintf(name, sizeof name, "rank %d", d->victim);
    CHECK(ranks_launch(&desc, death_rank, d, NULL) == DTRAIN_ERROR_RANK_FAILED);
    for (r = 0; r < 4; r++)
        if (r != d->victim)
            CHECK_MSG(d->result[r] == DTRAIN_ERROR_PEER && strstr(d->text[r], name) &&
                          d->seconds[r] < 15,
                      "%s, seed %d: rank %d: %s: %s", method_names[method], seed, r,
                      dtrain_result_text(d->result[r]), d->text[r]);
    munmap(d, sizeof *d);
}

static void test_deaths(void)
{
    int method, seed;
    for (method = 0; method < METHODS; method++)
        for (seed = 0; seed < (test_full() ? 40 : 6); seed++) check_death(method, seed);
}

/* Rank 1 destroys its strategy in the middle of a backward: an error for the others, and no hang. It waits until they
 * have left the step before, whose waits would end with the same error. */
typedef struct leaving_run {
    int method;
    int32_t there; /* ranks that have left it */
} leaving_run;

static int leaving_rank(dtrain_world *world, void *user)
{
    leaving_run *run = (leaving_run *)user;
    const int method = run->method, rank = dtrain_world_rank(world);
    const settings desc = method_desc(method);
    dtrain_result result = DTRAIN_OK;
    dtrain_strategy *s;
    squares *m = (squares *)malloc(sizeof *m);
    int step, p;
    squares_init(m);
    RANKS_TRY(settings_create(world, m->params, SQUARES, &desc, &s));
    for (step = 0; step < 2; step++) RANKS_TRY(squares_step(m, s, rank, step));
    ranks_count(&run->there);
    if (rank == 1) ranks_await(&run->there, 4);
    for (p = SQUARES - 1; p >= 0 && (p > 1 || rank != 1) && result == DTRAIN_OK; p--)
        result = dtrain_strategy_ready(s, (size_t)p);
    if (rank != 1) {
        if (result == DTRAIN_OK) result = dtrain_strategy_finish(s);
        CHECK_MSG(result == DTRAIN_ERROR_PEER && strstr(dtrain_last_error(), "rank 1"),
                  "%s: rank %d: %s: %s", method_names[method], rank, dtrain_result_text(result),
                  result == DTRAIN_OK ? "" : dtrain_last_error());
        CHECK(dtrain_strategy_finish(s) != DTRAIN_OK); /* and stays so */
    }
    dtrain_strategy_destroy(s);
    free(m);
    return 0;
}

static void test_abandoned_backward(void)
{
    int method;
    for (method = 0; method < METHODS; method++) {
        leaving_run run = {method, 0};
        ranks_run(4, DTRAIN_LAUNCH_THREADS, leaving_rank, &run);
    }
}

/* A missing gradient as an error: all ranks hear of it, and the next steps are the same on all. */
typedef struct missing_run {
    int method;
    uint64_t hash[FIELD_RANKS];
} missing_run;

static int missing_rank(dtrain_world *world, void *user)
{
    missing_run *run = (missing_run *)user;
    const int rank = dtrain_world_rank(world);
    settings desc = method_desc(run->method);
    dtrain_strategy *s;
    squares *m = (squares *)malloc(sizeof *m);
    dtrain_result result;
    int step, p;
    squares_init(m);
    desc.base.missing_gradient = DTRAIN_MISSING_GRADIENT_ERROR;
    RANKS_TRY(settings_create(world, m->params, SQUARES, &desc, &s));
    for (step = 0; step < 2; step++) RANKS_TRY(squares_step(m, s, rank, step));
    for (p = SQUARES - 1; p >= (rank == 2 ? 1 : 0); p--)
        RANKS_TRY(dtrain_strategy_ready(s, (size_t)p));
    result = dtrain_strategy_finish(s);
    CHECK_MSG(result == DTRAIN_ERROR_USAGE && strstr(dtrain_last_error(), "\"s0\""),
              "%s: rank %d: %s: %s", method_names[run->method], rank, dtrain_result_text(result),
              result == DTRAIN_OK ? "" : dtrain_last_error());
    for (step = 2; step < 4; step++) RANKS_TRY(squares_step(m, s, rank, step));
    run->hash[rank] = squares_hash(m);
    dtrain_strategy_destroy(s);
    free(m);
    return 0;
}

static void test_missing_gradient_is_an_error(void)
{
    int method, r;
    for (method = 0; method < METHODS; method++) {
        missing_run *run = (missing_run *)ranks_shared(sizeof *run);
        run->method = method;
        ranks_run(4, DTRAIN_LAUNCH_PROCESSES, missing_rank, run);
        for (r = 1; r < 4; r++) CHECK(run->hash[r] == run->hash[0]);
        munmap(run, sizeof *run);
    }
}

/* ---- many ranks ---- */

typedef struct many {
    int method;
    uint64_t hash[RANKS_MOST];
} many;

/* Two compressed steps; rank 0 sees that nothing was lost. */
static int many_rank(dtrain_world *world, void *user)
{
    many *run = (many *)user;
    const int rank = dtrain_world_rank(world), ranks = dtrain_world_size(world);
    settings desc = method_desc(run->method);
    const dtrain__kept *states;
    dtrain_strategy *s;
    size_t count, k;
    int64_t i;
    int step, r;
    float *kept = (float *)calloc(SQUARES * SQUARE, sizeof *kept), *sent;
    squares *m = (squares *)malloc(sizeof *m);
    sent = (float *)calloc(SQUARES * SQUARE, sizeof *sent);
    squares_init(m);
    desc.how.dense_steps = DTRAIN_DENSE_STEPS_NONE;
    desc.how.topk_momentum = 0;
    desc.base.node_size = desc.base.hierarchical ? 8 : 0;
    RANKS_TRY(settings_create(world, m->params, SQUARES, &desc, &s));
    for (step = 0; step < 2; step++) {
        RANKS_TRY(squares_step(m, s, rank, step));
        for (i = 0; i < SQUARES * SQUARE; i++) sent[i] += m->params[i / SQUARE].grad[i % SQUARE];
    }
    run->hash[rank] = squares_hash(m);
    states = dtrain__kept_of(s, &count);
    for (k = 0; k < count; k++)
        memcpy(kept + (states[k].param - m->params) * SQUARE + states[k].offset, states[k].residual,
               (size_t)states[k].count * sizeof *kept);
    RANKS_TRY(dtrain_all_reduce(dtrain_world_comm(world), kept, kept, SQUARES * SQUARE,
                                DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    for (i = 0; i < SQUARES * SQUARE && rank == 0 && desc.how.kind; i++) {
        double came = 0;
        for (step = 0; step < 2; step++)
            for (r = 0; r < ranks; r++)
                came += (double)field_noise(field_mix((int)(i / SQUARE), r, step, 0, i % SQUARE));
        if (fabs(came - (double)kept[i] - (double)sent[i] * ranks) > 2e-2) break;
    }
    CHECK_MSG(rank || !desc.how.kind || i == SQUARES * SQUARE, "%s: element %lld is lost",
              method_names[run->method], (long long)i);
    dtrain_strategy_destroy(s);
    free(kept);
    free(sent);
    free(m);
    return 0;
}

static void test_64_ranks(void)
{
    int method, r;
    for (method = 0; method < METHODS; method++) {
        many *run = (many *)ranks_shared(sizeof *run);
        run->method = method;
        if (method == 1) continue;
        ranks_run(64, DTRAIN_LAUNCH_THREADS, many_rank, run);
        for (r = 1; r < 64; r++)
            CHECK_MSG(run->hash[r] == run->hash[0], "%s: rank %d has other gradients",
                      method_names[method], r);
        munmap(run, sizeof *run);
    }
}

/* ---- learning ---- */

typedef struct pull {
    settings desc;
    int steps;
    float lr;
    double left[FIELD_RANKS]; /* |w - c|^2 / |c|^2 in the end */
} pull;

/* Rank r pulls w to c + d_r, where the d_r of two neighbours cancel: only the mean is c. */
static float pull_target(int p, int64_t i) { return field_noise(field_mix(p, 60, 0, 0, i)); }
static float pull_offset(int p, int rank, int64_t i)
{
    const float d = 2 * field_noise(field_mix(p, 61, rank / 2, 0, i));
    return rank % 2 ? d : -d;
}

static int pull_rank(dtrain_world *world, void *user)
{
    pull *run = (pull *)user;
    const int rank = dtrain_world_rank(world);
    double off = 0, all = 0;
    dtrain_strategy *s;
    squares *m = (squares *)malloc(sizeof *m), *to = (squares *)malloc(sizeof *to);
    int step, p;
    int64_t i;
    squares_init(m);
    for (p = 0; p < SQUARES; p++)
        for (i = 0; i < SQUARE; i++) to->values[p][i] = pull_target(p, i) + pull_offset(p, rank, i);
    RANKS_TRY(settings_create(world, m->params, SQUARES, &run->desc, &s));
    for (step = 0; step < run->steps; step++) {
        for (p = SQUARES - 1; p >= 0; p--) {
            for (i = 0; i < SQUARE; i++) m->params[p].grad[i] = m->values[p][i] - to->values[p][i];
            RANKS_TRY(dtrain_strategy_ready(s, (size_t)p));
        }
        RANKS_TRY(dtrain_strategy_finish(s));
        for (p = 0; p < SQUARES; p++)
            for (i = 0; i < SQUARE; i++) m->values[p][i] -= run->lr * m->params[p].grad[i];
    }
    for (p = 0; p < SQUARES; p++)
        for (i = 0; i < SQUARE; i++) {
            const double c = (double)pull_target(p, i), w = (double)m->values[p][i];
            off += (w - c) * (w - c), all += c * c;
        }
    run->left[rank] = off / all;
    RANKS_TRY(dtrain_strategy_verify(s, NULL));
    dtrain_strategy_destroy(s);
    free(to);
    free(m);
    return 0;
}

static double pull_run(settings desc, int steps, float lr)
{
    pull *run = (pull *)ranks_shared(sizeof *run);
    double left;
    run->desc = desc, run->steps = steps, run->lr = lr;
    ranks_run(4, DTRAIN_LAUNCH_THREADS, pull_rank, run);
    left = run->left[0];
    munmap(run, sizeof *run);
    return left;
}

static void test_error_feedback(void)
{
    int method;
    for (method = 0; method < METHODS; method++) {
        settings desc = method_desc(method);
        double with, without;
        if (method == 1) continue;
        desc.how.topk_momentum = 0;
        desc.how.topk_ratio = 0.1f;
        with = pull_run(desc, 200, 0.04f);
        desc.how.no_error_feedback = true;
        without = pull_run(desc, 200, 0.04f);
        CHECK_MSG(with < 0.05 && without > 4 * with,
                  "%s: with error feedback %g is left, without %g", method_names[method], with,
                  without);
    }
}

/* A classifier: the loss of plain training, after as many steps. */
typedef struct lesson {
    settings desc;
    int steps;
    double loss; /* mean of the last steps and ranks */
} lesson;

static int lesson_rank(dtrain_world *world, void *user)
{
    lesson *run = (lesson *)user;
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    strategy_case c;
    strategy_job job;
    double loss = 0, samples = 0;
    float mean;
    int step;
    memset(&c, 0, sizeof c);
    memset(&job, 0, sizeof job);
    c.model = MODEL_MATMUL, c.micro = 1;
    job.c = &c;
    job.rank = dtrain_world_rank(world), job.ranks = dtrain_world_size(world);
    job.rows = 8;
    matmul_create(&job);
    RANKS_TRY(settings_create(world, job.params, 3, &run->desc, &job.strategy));
    RANKS_TRY(dtrain_optimizer_create(world, job.strategy, &adamw, &job.optimizer));
    RANKS_TRY(dtrain_tape_create(world, job.strategy, NULL, &job.tape));
    for (step = 0; step < run->steps; step++) {
        const int64_t place = (int64_t)(step * job.ranks + job.rank) * job.rows;
        if (step == run->steps - 30) loss = samples = 0;
        RANKS_TRY(strategy_pass(&job, place, 0, 1, &loss, &samples));
        RANKS_TRY(dtrain_optimizer_step(job.optimizer, 0.005f, 1));
    }
    mean = (float)(loss / samples);
    RANKS_TRY(dtrain_all_reduce(dtrain_world_comm(world), &mean, &mean, 1, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_MEAN, NULL));
    if (job.rank == 0) run->loss = (double)mean;
    strategy_job_destroy(&job);
    return 0;
}

static double lesson_loss(settings desc)
{
    lesson *run = (lesson *)ranks_shared(sizeof *run);
    double loss;
    run->desc = desc, run->steps = 200;
    run->desc.base.init_seed = 3;
    run->desc.how.dense_below = 1;
    ranks_run(4, DTRAIN_LAUNCH_THREADS, lesson_rank, run);
    loss = run->loss;
    munmap(run, sizeof *run);
    return loss;
}

static void test_learning(void)
{
    const double plain = lesson_loss(squares_desc(DTRAIN_COMPRESSION_NONE));
    int i;
    CHECK_MSG(plain < 2.2, "plain training ends at %g", plain);
    for (i = 0; i < METHODS; i++) {
        settings desc = method_desc(i == 1 ? 0 : i);
        double loss;
        desc.how.topk_ratio = i == 1 ? 0.01f : 0.1f;
        desc.how.topk_momentum = 0;
        desc.how.dense_steps = 10;
        loss = lesson_loss(desc);
        CHECK_MSG(loss < plain * 1.05, "%s: loss %g, plain %g", method_names[i == 1 ? 0 : i], loss,
                  plain);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_topk_ranks);
    RUN(test_topk_ratios);
    RUN(test_topk_momentum);
    RUN(test_topk_same_bits);
    RUN(test_topk_without_feedback);
    RUN(test_topk_cast);
    RUN(test_topk_dense_below);
    RUN(test_dense_steps_and_warmup);
    RUN(test_poison);
    RUN(test_topk_everything);
    RUN(test_large_shares);
    RUN(test_cast);
    RUN(test_nodes);
    RUN(test_one_node);
    RUN(test_emulated_nodes);
    RUN(test_groups);
    RUN(test_nodes_of_other_sizes);
    RUN(test_nodes_in_range);
    RUN(test_topk_between_nodes);
    RUN(test_node_kinds_2_ranks);
    RUN_NUMBERS(test_node_kinds_4_ranks);
    RUN_NUMBERS(test_node_kinds_8_ranks);
    RUN(test_node_kinds_6_ranks_of_3);
    RUN_NUMBERS(test_node_kinds_bf16);
    RUN(test_node_bytes);
    RUN(test_bytes);
    RUN(test_refused_settings);
    RUN(test_loss_scaling_is_refused);
    RUN(test_ranks_disagree);
    RUN(test_state);
    RUN(test_no_state);
    RUN(test_steady_state);
    RUN(test_allocation_failures);
    RUN(test_plan);
    RUN(test_deaths);
    RUN(test_abandoned_backward);
    RUN(test_missing_gradient_is_an_error);
    RUN(test_64_ranks);
    RUN_NUMBERS(test_error_feedback);
    RUN_NUMBERS(test_learning);
    return test_summary();
}
