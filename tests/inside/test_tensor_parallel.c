/* test_tensor_parallel.c: linear layers, conversions and what works on parts, over a tensor axis of 1 to 8 ranks.
 *
 * A program is run by t ranks and its parts are put together: values that were watched, gradients of inputs and of
 * parameters. The oracle is the whole: integers whose sums fit into a float, so that words are equal in any order of
 * addition; for layers with activations a naive loop in double; and where nothing is added up, the bits of one rank. */
#include "tape/tape_internal.h"
#include "parallel/mesh_internal.h"
#include "device/device_internal.h"
#include "dtrain.h"
#include "test.h"
#include "ranks.h"
#include "tape_error.h"

enum { MOST = 4096, RANKS = 8, PARAMS = 8, INPUTS = 4, WATCHED = 4, STEPS = 3 };

/* ---- a program, run by t ranks ---- */

typedef struct spec {
    int64_t rows, columns; /* columns 0: one axis */
    dtrain_cut cut;
    uint32_t flags;
} spec;

typedef struct seen {
    int64_t count[WATCHED], part_shape[WATCHED][4];
    uint32_t placement[WATCHED];
    float watched[WATCHED][MOST], input_grad[INPUTS][MOST], grad[PARAMS][MOST];
    int64_t at[WATCHED][MOST]; /* places of its elements in the whole */
    uint64_t allocations[STEPS];
    uint64_t pool, planned_pool;
    uint64_t sent[DTRAIN_COLLECTIVE_KINDS]; /* bytes of the last step along the axis, by kind */
    size_t recomputed;
    dtrain_result error;
    char text[1024];
} seen;

struct job;
typedef struct local {
    struct job *job;
    dtrain_tape *tape;
    dtrain_tensor *x[INPUTS];
    dtrain_param p[PARAMS];
    int ranks, rank, watched;
    bool plan; /* nothing can be watched */
} local;
typedef dtrain_tensor *(*body)(local *l);

typedef struct job {
    body run;
    int ranks, input_count, param_count, kind;
    bool sequence, real, with_strategy, no_overlap, no_plan, unit;
    uint32_t flags, recompute;
    int64_t shape[INPUTS][2];
    bool fixed[INPUTS]; /* no gradient */
    spec specs[PARAMS];
    int mode, other; /* of the body */
    seen out[RANKS];
} job;

/* Places in the whole of what rank r of t has along an axis of `whole`, written down one by one. */
static int64_t places(const dtrain_cut *cut, int64_t whole, int t, int r, int64_t *at)
{
    const int64_t components = cut->components ? cut->components : 1;
    int64_t n = 0, begin = 0;
    for (int64_t c = 0; c < components; c++) {
        const int64_t width = cut->widths[0] ? cut->widths[c] : whole / components;
        const int64_t parts = cut->parts ? cut->parts : width;
        for (int64_t part = parts * r / t; part < parts * (r + 1) / t; part++)
            for (int64_t i = 0; i < width / parts; i++)
                at[n++] = begin + part * (width / parts) + i;
        begin += width;
    }
    return n;
}

static int64_t spec_places(const spec *s, int t, int r, int64_t *at)
{
    const int64_t columns = s->columns ? s->columns : 1;
    int64_t along[MOST], n = 0;
    if (s->cut.axis == DTRAIN_CUT_NONE || t == 1) {
        for (; n < s->rows * columns; n++) at[n] = n;
    } else if (s->cut.axis == DTRAIN_CUT_ROWS) {
        const int64_t rows = places(&s->cut, s->rows, t, r, along);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < columns; j++) at[n++] = along[i] * columns + j;
    } else {
        const int64_t mine = places(&s->cut, columns, t, r, along);
        for (int64_t i = 0; i < s->rows; i++)
            for (int64_t j = 0; j < mine; j++) at[n++] = i * columns + along[j];
    }
    return n;
}

static float number(const job *j, int tensor, int64_t i)
{
    const uint64_t bits = ranks_mix((uint64_t)tensor * 7919 + (uint64_t)i);
    if (j->real) return (float)(bits >> 40) / 8388608.0f - 1.0f;
    return (float)((int)(bits >> 40) % 17 - 8);
}
static float input_number(const job *j, int k, int64_t i) { return number(j, k, i); }
static float param_number(const job *j, int k, int64_t i)
{
    if (j->unit) return i / j->specs[k].columns == i % j->specs[k].columns ? 1.0f : 0.0f;
    return number(j, 100 + k, i) * (j->real ? 0.3f : 1.0f);
}

/* Notes the values of a tensor of `whole` columns, which are cut as `cut` says where they are. */
static void watch(local *l, dtrain_tensor *x, int64_t whole, const dtrain_cut *cut)
{
    static const dtrain_cut even;
    seen *out = &l->job->out[l->rank];
    const int k = l->watched++;
    int64_t columns[MOST], n = 0, rows, first = 0;
    if (!x || l->plan || !CHECK(k < WATCHED && x->count <= MOST)) return;
    out->count[k] = x->count;
    out->placement[k] = x->placement;
    memcpy(out->part_shape[k], x->shape, sizeof x->shape);
    CHECK(dtrain_tensor_read(l->tape, x, out->watched[k], NULL) == DTRAIN_OK);
    const int64_t here = x->shape[x->ndim - 1];
    rows = x->count / here;
    if (x->placement == DTRAIN_PLACEMENT_COLUMNS) {
        CHECK(places(cut ? cut : &even, whole, l->ranks, l->rank, columns) == here);
    } else {
        for (int64_t j = 0; j < here; j++) columns[j] = j;
        CHECK(here == whole);
    }
    if (x->placement == DTRAIN_PLACEMENT_ROWS) {
        const int64_t all = l->job->shape[0][0];
        first = all * l->rank / l->ranks;
        CHECK(rows == all * (l->rank + 1) / l->ranks - first);
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < here; j++) out->at[k][n++] = (first + i) * whole + columns[j];
}

static int run_rank(dtrain_world *world, void *user)
{
    job *j = (job *)user;
    dtrain_mesh_desc desc;
    dtrain_mesh *mesh = NULL;
    dtrain_strategy_desc settings;
    dtrain_strategy *strategy = NULL;
    dtrain_device_desc plan_desc;
    dtrain_device *plan = NULL;
    dtrain_tape_info info;
    local *l = (local *)calloc(1, sizeof *l);
    float *whole = (float *)malloc(MOST * sizeof(float));
    int64_t *at = (int64_t *)malloc(MOST * sizeof(int64_t));
    l->job = j;
    l->ranks = j->ranks;
    l->rank = dtrain_world_rank(world);
    seen *out = &j->out[l->rank];
    memset(&desc, 0, sizeof desc);
    desc.tensor = j->ranks;
    desc.sequence_parallel = j->sequence;
    RANKS_TRY(dtrain_mesh_create(world, &desc, &mesh));
    for (int k = 0; k < j->param_count; k++) {
        const spec *s = &j->specs[k];
        const int64_t count = spec_places(s, j->ranks, l->rank, at);
        dtrain_param *p = &l->p[k];
        static const char *const names[PARAMS] = {"p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7"};
        *p = ranks_param(names[k], (float *)malloc((size_t)count * sizeof(float)),
                         (float *)calloc((size_t)count, sizeof(float)), s->rows, s->columns);
        p->cut = s->cut;
        p->flags = s->flags;
        p->count = count;
        for (int64_t i = 0; i < count; i++) p->value[i] = param_number(j, k, at[i]);
    }
    if (j->with_strategy) {
        memset(&settings, 0, sizeof settings);
        settings.mesh = mesh;
        settings.no_overlap = j->no_overlap;
        RANKS_TRY(
            dtrain_strategy_create(world, l->p, (size_t)j->param_count, &settings, &strategy));
    }
    const dtrain__groups groups = dtrain__mesh_groups(world, mesh, NULL);
    for (int planned = j->no_plan ? 1 : 0; planned < 2; planned++) { /* first a plan */
        l->plan = planned == 0;
        memset(&plan_desc, 0, sizeof plan_desc);
        if (l->plan) RANKS_TRY(dtrain_device_create(dtrain__plan_device_ops(), &plan_desc, &plan));
        RANKS_TRY(dtrain_tape_create(l->plan ? NULL : world, l->plan ? NULL : strategy,
                                     l->plan ? plan : NULL, &l->tape));
        if (l->plan) dtrain__tape_plan(l->tape, NULL, &groups);
        else l->tape->groups = groups;
        RANKS_TRY(dtrain_tape_recompute(l->tape, j->recompute, 0));
        for (int step = 0; step < (l->plan ? 1 : STEPS); step++) {
            dtrain_comm_info before, after;
            dtrain_comm_query(groups.tensor, &before);
            l->watched = 0;
            dtrain_tape_begin(l->tape, j->flags, 11);
            for (int k = 0; k < j->param_count; k++) l->p[k].state.grad_written = false;
            for (int k = 0; k < j->input_count; k++) {
                for (int64_t i = 0; i < j->shape[k][0] * j->shape[k][1]; i++)
                    whole[i] = input_number(j, k, i);
                l->x[k] = dtrain_tape_input(l->tape, DTRAIN_DTYPE_F32, 2, j->shape[k], whole,
                                            !j->fixed[k]);
            }
            dtrain_tensor *loss = j->run(l);
            dtrain_result result = tape_error(l->tape);
            if (result == DTRAIN_OK && !(j->flags & DTRAIN_TAPE_NO_GRAD)) {
                result = dtrain_tape_backward(l->tape, loss, 1);
                if (result == DTRAIN_OK && strategy && !l->plan)
                    result = dtrain_strategy_finish(strategy);
            }
            dtrain_tape_query(l->tape, &info);
            out->error = result;
            if (result != DTRAIN_OK) {
                snprintf(out->text, sizeof out->text, "%s", dtrain_last_error());
                if (l->plan) continue;
                step =
                    STEPS; /* others may wait for what this rank would send: all fail alike here */
                continue;
            }
            if (l->plan) {
                out->planned_pool = info.gradient_bytes;
                dtrain_comm_query(groups.tensor, &after);
                CHECK_MSG(after.operation_count == before.operation_count, "a plan sends");
                continue;
            }
            out->pool = info.gradient_bytes;
            dtrain_comm_query(groups.tensor, &after);
            for (int k = 0; k < DTRAIN_COLLECTIVE_KINDS; k++)
                out->sent[k] = after.kind_bytes[k] - before.kind_bytes[k];
            out->allocations[step] = info.block_allocations;
            out->recomputed = info.recomputed_count;
            for (int k = 0; k < j->input_count && !j->flags; k++)
                if (!j->fixed[k])
                    RANKS_TRY(dtrain_tensor_read(l->tape, l->x[k], NULL, out->input_grad[k]));
            for (int k = 0; k < j->param_count; k++)
                memcpy(out->grad[k], l->p[k].grad, (size_t)l->p[k].count * sizeof(float));
        }
        dtrain_tape_destroy(l->tape);
        if (l->plan) dtrain_device_destroy(plan);
    }
    dtrain_strategy_destroy(strategy);
    for (int k = 0; k < j->param_count; k++) free(l->p[k].value), free(l->p[k].grad);
    dtrain_mesh_destroy(mesh);
    free(whole), free(at), free(l);
    return 0;
}

static void run_job(job *j)
{
    memset(j->out, 0, sizeof j->out);
    ranks_run(j->ranks, DTRAIN_LAUNCH_THREADS, run_rank, j);
}

/* ---- parts put together ---- */

static int64_t spec_count(const spec *s) { return s->rows * (s->columns ? s->columns : 1); }

/* The gradient of a parameter: cut ones together; whole ones as rank 0 has them, or what all of them add up to. */
static void whole_grad(const job *j, int k, double *to)
{
    const spec *s = &j->specs[k];
    int64_t at[MOST];
    for (int64_t i = 0; i < spec_count(s); i++) to[i] = s->cut.axis ? NAN : 0;
    for (int r = 0; r < j->ranks; r++) {
        const int64_t count = spec_places(s, j->ranks, r, at);
        for (int64_t i = 0; i < count; i++) {
            const double grad = (double)j->out[r].grad[k][i];
            if (s->cut.axis) to[at[i]] = grad;
            else if (j->sequence && j->ranks > 1) to[i] += grad;
            else if (r == 0) to[i] = grad;
            else
                CHECK_MSG(to[i] == grad, "p%d[%lld]: %g on rank %d, %g on rank 0", k, (long long)i,
                          grad, r, to[i]);
        }
    }
}

static void whole_watched(const job *j, int k, double *to)
{
    for (int64_t i = 0; i < MOST; i++) to[i] = NAN;
    for (int r = 0; r < j->ranks; r++)
        for (int64_t i = 0; i < j->out[r].count[k]; i++) {
            const double value = (double)j->out[r].watched[k][i];
            const int64_t at = j->out[r].at[k][i];
            if (r == 0 || j->out[r].placement[k]) to[at] = value;
            else
                CHECK_MSG(to[at] == value, "watched %d[%lld]: %g on rank %d, %g on rank 0", k,
                          (long long)at, value, r, to[at]);
        }
}

static bool agree(const double *found, const double *wanted, int64_t count, double tolerance,
                  const char *what, int k, const job *j)
{
    for (int64_t i = 0; i < count; i++) {
        const double bound = tolerance * (fabs(wanted[i]) > 1 ? fabs(wanted[i]) : 1);
        if (fabs(found[i] - wanted[i]) <= bound) continue;
        return CHECK_MSG(false, "%s %d[%lld] of %d ranks%s: %.9g, expected %.9g", what, k,
                         (long long)i, j->ranks, j->sequence ? ", rows divided" : "", found[i],
                         wanted[i]);
    }
    return CHECK(true);
}

/* Compares everything that t ranks have with what one has. Integers: tolerance 0. */
static void compare(const job *j, const job *one, double tolerance)
{
    static double found[MOST], wanted[MOST];
    for (int r = 0; r < j->ranks; r++)
        if (!CHECK_MSG(j->out[r].error == DTRAIN_OK, "%d ranks: %s", j->ranks, j->out[r].text))
            return;
    for (int k = 0; k < WATCHED; k++) {
        int64_t count = one->out[0].count[k];
        whole_watched(j, k, found);
        whole_watched(one, k, wanted);
        agree(found, wanted, count, tolerance, "watched", k, j);
    }
    for (int k = 0; k < j->param_count && !(j->flags & DTRAIN_TAPE_NO_GRAD); k++) {
        if (j->specs[k].flags & DTRAIN_PARAM_FROZEN) continue;
        whole_grad(j, k, found);
        whole_grad(one, k, wanted);
        agree(found, wanted, spec_count(&j->specs[k]), tolerance, "gradient of p", k, j);
    }
    for (int k = 0; k < j->input_count && !j->flags; k++)
        for (int r = 0; r < j->ranks && !j->fixed[k]; r++) {
            const int64_t count = j->shape[k][0] * j->shape[k][1];
            for (int64_t i = 0; i < count; i++) {
                found[i] = (double)j->out[r].input_grad[k][i];
                wanted[i] = (double)one->out[0].input_grad[k][i];
            }
            agree(found, wanted, count, tolerance, "gradient of input", k, j);
        }
    for (int r = 0; r < j->ranks; r++) {
        const seen *out = &j->out[r];
        CHECK_MSG(out->allocations[0] == out->allocations[STEPS - 1],
                  "%llu allocations in the first step, then %llu",
                  (unsigned long long)out->allocations[0],
                  (unsigned long long)out->allocations[STEPS - 1]);
        CHECK_MSG(j->no_plan || out->planned_pool == out->pool,
                  "%d ranks: a plan has %llu bytes of gradients, the tape %llu", j->ranks,
                  (unsigned long long)out->planned_pool, (unsigned long long)out->pool);
    }
}

static job *job_new(body run, int ranks)
{
    job *j = (job *)calloc(1, sizeof *j);
    j->run = run;
    j->ranks = ranks;
    return j;
}
static void input(job *j, int64_t rows, int64_t columns, bool fixed)
{
    j->shape[j->input_count][0] = rows;
    j->shape[j->input_count][1] = columns;
    j->fixed[j->input_count++] = fixed;
}
static spec *param(job *j, int64_t rows, int64_t columns, uint32_t axis)
{
    spec *s = &j->specs[j->param_count++];
    s->rows = rows;
    s->columns = columns;
    s->cut.axis = axis;
    return s;
}
static dtrain_tensor *as(local *l, dtrain_tensor *x, dtrain_placement placement)
{
    return dtrain_place(l->tape, x, placement);
}

/* Begins a unit; parameters of a strategy are all of the first. */
static void unit(local *l, uint32_t number)
{
    if (!l->job->with_strategy) dtrain_tape_unit(l->tape, number);
}

static const int sizes[] = {1, 2, 3, 4, 8};
enum { SIZES = sizeof sizes / sizeof *sizes };

/* ---- a pair of layers ---- */

enum { ROWS = 24, IN = 16, HIDDEN = 24, OUT = 16 };
enum { W1, B1, W2, B2, W3 };

/* y = (act(x W1 + b1) + x W3) W2 + b2, loss = sum of c y: x has two uses, and d_x two contributions. */
static dtrain_tensor *pair(local *l)
{
    dtrain_tensor *x = l->x[0], *h, *y;
    const dtrain_activation act = (dtrain_activation)l->job->mode;
    const dtrain_cut *cut = &l->job->specs[W1].cut;
    dtrain_tape_unit(l->tape, 0);
    if (l->job->sequence) x = as(l, x, DTRAIN_PLACEMENT_ROWS);
    h = dtrain_linear(l->tape, x, &l->p[W1], &l->p[B1], act);
    if (l->job->param_count > W3)
        h = dtrain_add(l->tape, h,
                       dtrain_linear(l->tape, x, &l->p[W3], NULL, DTRAIN_ACTIVATION_NONE));
    watch(l, h, l->job->specs[W1].rows, cut);
    y = dtrain_linear(l->tape, h, &l->p[W2], &l->p[B2], (dtrain_activation)l->job->other);
    watch(l, y, OUT, NULL);
    unit(l, 1);
    y = as(l, dtrain_scale(l->tape, y, 1), DTRAIN_PLACEMENT_WHOLE);
    watch(l, y, OUT, NULL);
    unit(l, 2);
    return dtrain_sum(l->tape, dtrain_multiply(l->tape, y, l->x[1]));
}

static job *pair_job(int ranks, int64_t hidden, bool sequence)
{
    job *j = job_new(pair, ranks);
    j->sequence = sequence;
    j->mode = DTRAIN_ACTIVATION_RELU;
    input(j, ROWS, IN, false);
    input(j, ROWS, OUT, true);
    param(j, hidden, IN, DTRAIN_CUT_ROWS);
    param(j, hidden, 0, DTRAIN_CUT_ROWS);
    param(j, OUT, hidden, DTRAIN_CUT_COLUMNS);
    param(j, OUT, 0, DTRAIN_CUT_NONE);
    param(j, hidden, IN, DTRAIN_CUT_ROWS);
    return j;
}

/* Integers in [-8, 8]: forward and all gradients of t ranks have the words of one, with as many rows for each rank
 * and without, and in whatever sizes hidden columns are cut. */
static void test_pair_integers(void)
{
    for (int i = 0; i < SIZES; i++)
        for (int sequence = 0; sequence < 2; sequence++)
            for (int how = 0; how < 4; how++) {
                job *j = pair_job(sizes[i], how == 1 ? 25 : HIDDEN, sequence);
                job *one = pair_job(1, how == 1 ? 25 : HIDDEN, false);
                if (how == 2) j->recompute = 1;
                if (how == 3) j->param_count = one->param_count = W3;
                run_job(j);
                run_job(one);
                compare(j, one, 0);
                if (how == 2) CHECK(j->out[0].recomputed > 0);
                CHECK(j->out[0].placement[1] == (sizes[i] == 1 ? DTRAIN_PLACEMENT_WHOLE
                                                 : sequence    ? DTRAIN_PLACEMENT_ROWS
                                                               : DTRAIN_PLACEMENT_WHOLE));
                free(j), free(one);
            }
}

static double activate(double z, int act)
{
    return act == DTRAIN_ACTIVATION_RELU ? (z > 0 ? z : 0)
           : act == DTRAIN_ACTIVATION_GELU
               ? 0.5 * z * (1 + tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)))
           : act == DTRAIN_ACTIVATION_SILU ? z / (1 + exp(-z))
                                           : z;
}
static double slope(double z, int act)
{
    const double e = 1e-5;
    return (activate(z + e, act) - activate(z - e, act)) / (2 * e);
}

/* The pair without W3 as loops in double. */
static void naive_pair(const job *j, double *h, double *y, double *d_x, double *d[4])
{
    static double z1[ROWS * HIDDEN], z2[ROWS * OUT], d_h[ROWS * HIDDEN], d_z[ROWS * OUT];
    memset(d_x, 0, ROWS * IN * sizeof *d_x);
    memset(d[W1], 0, HIDDEN * IN * sizeof **d), memset(d[B1], 0, HIDDEN * sizeof **d);
    memset(d[W2], 0, OUT * HIDDEN * sizeof **d), memset(d[B2], 0, OUT * sizeof **d);
    memset(d_h, 0, sizeof d_h);
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < HIDDEN; i++) {
            double z = (double)param_number(j, B1, i);
            for (int k = 0; k < IN; k++)
                z += (double)input_number(j, 0, r * IN + k) *
                     (double)param_number(j, W1, i * IN + k);
            z1[r * HIDDEN + i] = z;
            h[r * HIDDEN + i] = activate(z, j->mode);
        }
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < OUT; o++) {
            double z = (double)param_number(j, B2, o);
            for (int i = 0; i < HIDDEN; i++)
                z += h[r * HIDDEN + i] * (double)param_number(j, W2, o * HIDDEN + i);
            z2[r * OUT + o] = z;
            y[r * OUT + o] = activate(z, j->other);
            d_z[r * OUT + o] = (double)input_number(j, 1, r * OUT + o) * slope(z, j->other);
            d[B2][o] += d_z[r * OUT + o];
            for (int i = 0; i < HIDDEN; i++) {
                d[W2][o * HIDDEN + i] += d_z[r * OUT + o] * h[r * HIDDEN + i];
                d_h[r * HIDDEN + i] +=
                    d_z[r * OUT + o] * (double)param_number(j, W2, o * HIDDEN + i);
            }
        }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < HIDDEN; i++) {
            const double dz = d_h[r * HIDDEN + i] * slope(z1[r * HIDDEN + i], j->mode);
            d[B1][i] += dz;
            for (int k = 0; k < IN; k++) {
                d[W1][i * IN + k] += dz * (double)input_number(j, 0, r * IN + k);
                d_x[r * IN + k] += dz * (double)param_number(j, W1, i * IN + k);
            }
        }
    (void)z2;
}

/* Real numbers, activations inside and behind the sum, in fp32 and under autocast, beside loops in double. */
static void test_pair_in_double(void)
{
    static double h[ROWS * HIDDEN], y[ROWS * OUT], d_x[ROWS * IN], found[MOST];
    static double d1[HIDDEN * IN], db1[HIDDEN], d2[OUT * HIDDEN], db2[OUT];
    double *d[4] = {d1, db1, d2, db2};
    for (int i = 1; i < SIZES; i++)
        for (int act = 0; act < 16; act++)
            for (int sequence = 0; sequence < 2; sequence++) {
                const uint32_t low = act == 9 ? DTRAIN_TAPE_BF16 : act == 6 ? DTRAIN_TAPE_F16 : 0;
                const double tolerance = low == DTRAIN_TAPE_BF16 ? 0.12 : low ? 0.03 : 3e-5;
                if (act % 3 != i % 3) continue; /* each with some sizes */
                job *j = pair_job(sizes[i], HIDDEN, sequence);
                j->real = true;
                j->param_count = W3;
                j->mode = act / 4, j->other = act % 4;
                j->flags = 0;
                run_job(j);
                naive_pair(j, h, y, d_x, d);
                whole_watched(j, 0, found);
                agree(found, h, ROWS * HIDDEN, tolerance, "h", 0, j);
                whole_watched(j, 1, found);
                agree(found, y, ROWS * OUT, tolerance, "y", 0, j);
                for (int k = 0; k < W3; k++) {
                    whole_grad(j, k, found);
                    agree(found, d[k], spec_count(&j->specs[k]), 2e-4, "gradient of p", k, j);
                }
                for (int64_t at = 0; at < ROWS * IN; at++)
                    found[at] = (double)j->out[0].input_grad[0][at];
                agree(found, d_x, ROWS * IN, 2e-4, "gradient of input", 0, j);
                if (low) {
                    j->flags = low;
                    run_job(j);
                    whole_watched(j, 1, found);
                    agree(found, y, ROWS * OUT, tolerance, "y in 16 bits", 0, j);
                    for (int k = 0; k < W3; k++) {
                        whole_grad(j, k, found);
                        agree(found, d[k], spec_count(&j->specs[k]), 2 * tolerance,
                              "16-bit gradient of p", k, j);
                    }
                }
                free(j);
            }
}

/* ---- conversions ---- */

enum { PACKED = 3, C_ROWS = 9, C_COLUMNS = 13 };

static const dtrain_cut uneven_pair = {DTRAIN_CUT_ROWS, 2, 0, {4, 9}};

/* Brings x to one of four placements; columns in two runs are what a layer with the unit matrix makes. */
static dtrain_tensor *brought(local *l, dtrain_tensor *x, int placement)
{
    if (placement < PACKED) return as(l, x, (dtrain_placement)placement);
    return dtrain_linear(l->tape, x, &l->p[0], NULL, DTRAIN_ACTIVATION_NONE);
}

/* loss = sum of c (x w) + c x, where x w is made in one placement and c x in another; x has two uses. */
static dtrain_tensor *converted(local *l)
{
    const int from = l->job->mode, to = l->job->other;
    const dtrain_placement whole = DTRAIN_PLACEMENT_WHOLE;
    dtrain_tensor *y =
        dtrain_multiply(l->tape, brought(l, l->x[0], from), brought(l, l->x[1], from));
    watch(l, y, C_COLUMNS, from == PACKED ? &uneven_pair : NULL);
    dtrain_tape_unit(l->tape, 0);
    if (to == PACKED) y = as(l, y, whole); /* a layer takes no columns */
    y = dtrain_scale(l->tape, brought(l, y, to), 1);
    watch(l, y, C_COLUMNS, to == PACKED ? &uneven_pair : NULL);
    dtrain_tape_unit(l->tape, 1);
    y = as(l, dtrain_multiply(l->tape, y, brought(l, l->x[2], to)), whole);
    dtrain_tape_unit(l->tape, 2);
    dtrain_tensor *other =
        dtrain_multiply(l->tape, brought(l, l->x[0], to), brought(l, l->x[2], to));
    y = dtrain_add(l->tape, y, as(l, other, whole));
    dtrain_tape_unit(l->tape, 3);
    return dtrain_sum(l->tape, y);
}

/* Every conversion is adjoint to its backward, <c, op(x)> = <backward(c), x> for whole numbers, where the products are
 * those of all elements: gradients c w + c and c x, and parts that are the right elements. */
static void test_conversions(void)
{
    for (int i = 1; i < SIZES; i++)
        for (int from = 0; from <= PACKED; from++)
            for (int to = 0; to <= PACKED; to++)
                for (int even = 0; even < 2; even++) {
                    const int64_t rows = even ? 24 : C_ROWS, count = rows * C_COLUMNS;
                    const int t = sizes[i];
                    double found[MOST], wanted[MOST], adjoint = 0, forward = 0;
                    /* a component has 4; and columns are columns, whatever their cut */
                    if ((from == PACKED || to == PACKED) && t > 4) continue;
                    if (from == PACKED && to == DTRAIN_PLACEMENT_COLUMNS) continue;
                    job *j = job_new(converted, t);
                    j->mode = from, j->other = to;
                    j->unit = true;
                    for (int k = 0; k < 3; k++) input(j, rows, C_COLUMNS, k == 2);
                    param(j, C_COLUMNS, C_COLUMNS, DTRAIN_CUT_ROWS)->cut = uneven_pair;
                    j->specs[0].flags = DTRAIN_PARAM_FROZEN;
                    j->recompute = even ? 1 : 0;
                    run_job(j);
                    if (!CHECK_MSG(j->out[0].error == DTRAIN_OK, "%d to %d: %s", from, to,
                                   j->out[0].text))
                        return;
                    whole_watched(j, 0, found);
                    for (int64_t k = 0; k < count; k++)
                        wanted[k] = (double)input_number(j, 0, k) * (double)input_number(j, 1, k);
                    agree(found, wanted, count, 0, "made", from, j);
                    whole_watched(j, 1, found);
                    agree(found, wanted, count, 0, "converted", to, j);
                    for (int r = 0; r < t; r++) {
                        adjoint = forward = 0;
                        for (int64_t k = 0; k < count; k++) {
                            const double x = (double)input_number(j, 0, k),
                                         w = (double)input_number(j, 1, k);
                            const double c = (double)input_number(j, 2, k);
                            CHECK((double)j->out[r].input_grad[0][k] == c * w + c);
                            CHECK((double)j->out[r].input_grad[1][k] == c * x);
                            adjoint += (double)j->out[r].input_grad[1][k] * w;
                            forward += c * found[k];
                        }
                        CHECK(adjoint == forward);
                    }
                    CHECK(j->out[t - 1].planned_pool == j->out[t - 1].pool);
                    CHECK(j->out[0].allocations[0] == j->out[0].allocations[STEPS - 1]);
                    free(j);
                }
}

/* ---- operations of elements and rows ---- */

enum {
    ADD,
    MULTIPLY,
    SCALE,
    ACTIVATE,
    SWIGLU,
    CAST,
    DROPOUT,
    RESHAPE,
    ELEMENTWISE, /* from here on of rows alone */
    SOFTMAX = ELEMENTWISE,
    LAYERNORM,
    RMS_NORM,
    LAYERS,
    OPERATIONS
};
enum { O_ROWS = 24, O_COLUMNS = 16 };
static const dtrain_cut of_three = {DTRAIN_CUT_ROWS, 2, 0, {6, 10}};

static dtrain_tensor *operation(local *l, dtrain_tensor *x, dtrain_tensor *w)
{
    const int64_t flat[2] = {-1, O_COLUMNS}, deep[3] = {4, O_ROWS / 4, O_COLUMNS};
    dtrain_tensor *stream = w, *y;
    switch (l->job->mode) {
    case ADD: return dtrain_add(l->tape, x, w);
    case MULTIPLY: return dtrain_multiply(l->tape, x, w);
    case SCALE: return dtrain_scale(l->tape, x, 0.7f);
    case ACTIVATE: return dtrain_activate(l->tape, x, DTRAIN_ACTIVATION_GELU);
    case SWIGLU: return dtrain_swiglu(l->tape, x, w);
    case CAST:
        return dtrain_cast(l->tape, dtrain_cast(l->tape, x, DTRAIN_DTYPE_BF16), DTRAIN_DTYPE_F32);
    case DROPOUT: return dtrain_dropout(l->tape, dtrain_dropout(l->tape, x, 0.3f), 0.2f);
    case RESHAPE:
        if (x && x->placement != DTRAIN_PLACEMENT_ROWS) x = dtrain_reshape(l->tape, x, 3, deep);
        return dtrain_reshape(l->tape, x, 2, flat);
    case SOFTMAX: return dtrain_softmax(l->tape, x);
    case LAYERNORM: return dtrain_layernorm(l->tape, x, NULL, &l->p[1], &l->p[2], 1e-5f);
    case RMS_NORM:
        y = dtrain_rms_norm(l->tape, x, &stream, &l->p[1], 1e-5f);
        return dtrain_add(l->tape, y, stream);
    default: /* whole layers, whose activation the outer one's product differentiates */
        y = dtrain_linear(l->tape, x, &l->p[3], &l->p[4], DTRAIN_ACTIVATION_GELU);
        return dtrain_linear(l->tape, y, &l->p[5], &l->p[2], DTRAIN_ACTIVATION_NONE);
    }
}

static dtrain_tensor *operated(local *l)
{
    const int how = l->job->other;
    dtrain_tensor *x = brought(l, l->x[0], how), *w = brought(l, l->x[1], how);
    dtrain_tape_unit(l->tape, 0);
    dtrain_tensor *y = operation(l, x, w);
    watch(l, y, O_COLUMNS, how == PACKED ? &of_three : NULL);
    y = as(l, dtrain_multiply(l->tape, y, brought(l, l->x[2], how)), DTRAIN_PLACEMENT_WHOLE);
    dtrain_tape_unit(l->tape, 1);
    return dtrain_sum(l->tape, dtrain_scale(l->tape, y, 1));
}

static job *operation_job(int ranks, int op, int placement, bool sequence)
{
    job *j = job_new(operated, ranks);
    j->mode = op, j->other = placement;
    j->real = true, j->unit = placement == PACKED;
    j->sequence = sequence;
    for (int k = 0; k < 3; k++) input(j, O_ROWS, O_COLUMNS, k == 2);
    param(j, O_COLUMNS, O_COLUMNS, DTRAIN_CUT_ROWS)->cut = of_three;
    j->specs[0].flags = DTRAIN_PARAM_FROZEN;
    if (op >= LAYERNORM) {
        param(j, O_COLUMNS, 0, DTRAIN_CUT_NONE);
        param(j, O_COLUMNS, 0, DTRAIN_CUT_NONE);
        param(j, 20, O_COLUMNS, DTRAIN_CUT_NONE);
        param(j, 20, 0, DTRAIN_CUT_NONE);
        param(j, O_COLUMNS, 20, DTRAIN_CUT_NONE);
    }
    return j;
}

/* Nothing is added up over the ranks, so values and gradients of inputs have the bits of one rank: masks of dropout
 * too. Gradients of whole parameters are sums over rows: each row counts once, however they are divided. */
static void test_operations(void)
{
    static double found[MOST], wanted[MOST];
    for (int op = 0; op < OPERATIONS; op++)
        for (int placement = 0; placement <= PACKED; placement++)
            for (int i = 1; i < SIZES; i++)
                for (int sequence = 0; sequence < 2; sequence++) {
                    const bool rows = placement == DTRAIN_PLACEMENT_ROWS;
                    if (placement && !rows && op >= ELEMENTWISE) continue;
                    if (rows && !sequence && op >= LAYERNORM) continue; /* refused */
                    if (placement == PACKED && sizes[i] > 6) continue;
                    job *j = operation_job(sizes[i], op, placement, sequence);
                    job *one = operation_job(1, op, placement, false);
                    j->recompute = (uint32_t)sequence;
                    run_job(j), run_job(one);
                    if (op < LAYERNORM) {
                        compare(j, one, 0);
                    } else {
                        compare(j, one, 1e-4);
                        whole_watched(j, 0, found), whole_watched(one, 0, wanted);
                        agree(found, wanted, O_ROWS * O_COLUMNS, 0, "values", op, j);
                    }
                    free(j), free(one);
                }
}

/* ---- bytes ---- */

/* A pair sends one sum forward and one backward; with rows divided as many gathers and scattered sums, and backward
 * gathers x once more. The conversions around it gather y and d_x. */
static void test_bytes(void)
{
    const uint64_t in = ROWS * IN * 4, out = ROWS * OUT * 4;
    for (int i = 1; i < SIZES; i++)
        for (int sequence = 0; sequence < 2; sequence++) {
            const uint64_t t = (uint64_t)sizes[i], *sent;
            job *j = pair_job(sizes[i], HIDDEN, sequence);
            j->param_count = W3;
            run_job(j);
            CHECK_MSG(j->out[0].error == DTRAIN_OK, "%s", j->out[0].text);
            sent = j->out[0].sent;
            CHECK(sent[DTRAIN_COLLECTIVE_ALL_REDUCE] ==
                  (sequence ? 0 : 2 * (in + out) * (t - 1) / t));
            CHECK(sent[DTRAIN_COLLECTIVE_REDUCE_SCATTER] ==
                  (sequence ? (in + out) * (t - 1) / t : 0));
            CHECK(sent[DTRAIN_COLLECTIVE_ALL_GATHER] ==
                  (sequence ? (3 * in + 2 * out) * (t - 1) / t : 0));
            CHECK(sent[DTRAIN_COLLECTIVE_BROADCAST] + sent[DTRAIN_COLLECTIVE_REDUCE] == 0);
            free(j);
        }
}

/* ---- an operation of a program's own ---- */

/* y = x * token of the row, and a plain copy. */
static dtrain_result own_prepare(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[op->input_count - 1];
    dtrain_op_output(op, DTRAIN_DTYPE_F32, x->ndim, x->shape);
    return DTRAIN_OK;
}
static void own_run(const dtrain_op *op, const float *from, float *to, bool add)
{
    const dtrain_tensor *x = op->inputs[op->input_count - 1];
    const int64_t n = x->shape[x->ndim - 1];
    const int32_t *tokens = op->input_count > 1 ? (const int32_t *)op->input_data[0] : NULL;
    for (int64_t i = 0; i < x->count; i++)
        to[i] = (add ? to[i] : 0) + from[i] * (tokens ? (float)tokens[i / n] : 1.0f);
}
static dtrain_result own_forward(dtrain_op *op)
{
    own_run(op, (const float *)op->input_data[op->input_count - 1], (float *)op->output_data[0],
            false);
    return DTRAIN_OK;
}
static dtrain_result own_backward(dtrain_op *op)
{
    bool add;
    float *d_x = (float *)dtrain_op_input_grad(op, op->input_count - 1, &add);
    if (d_x && !op->planning) own_run(op, (const float *)op->outputs[0]->grad, d_x, add);
    return DTRAIN_OK;
}
static const dtrain_op_desc own_whole = {
    0,           DTRAIN_RECOMPUTE_ELEMENTWISE, 0, 0, false, "own_whole", own_prepare, own_forward,
    own_backward};
static const dtrain_op_desc own_any = {0,           DTRAIN_RECOMPUTE_ELEMENTWISE,
                                       0,           DTRAIN_OP_TAKES_COLUMNS | DTRAIN_OP_TAKES_ROWS,
                                       false,       "own_any",
                                       own_prepare, own_forward,
                                       own_backward};
static const dtrain_op_desc own_tokens = {
    0,           DTRAIN_RECOMPUTE_ELEMENTWISE,
    1,           DTRAIN_OP_TAKES_COLUMNS | DTRAIN_OP_TAKES_ROWS,
    false,       "own_tokens",
    own_prepare, own_forward,
    own_backward};

static dtrain_tensor *own(local *l)
{
    const dtrain_op_desc *desc = l->job->mode == 0   ? &own_whole
                                 : l->job->mode == 1 ? &own_any
                                                     : &own_tokens;
    int32_t tokens[O_ROWS];
    const int64_t shape[1] = {O_ROWS};
    for (int i = 0; i < O_ROWS; i++) tokens[i] = i % 5 - 2;
    dtrain_tensor *x = brought(l, l->x[0], l->job->other);
    dtrain_tensor *inputs[2] = {
        dtrain_tape_input(l->tape, DTRAIN_DTYPE_I32, 1, shape, tokens, false), x};
    const uint32_t first = desc == &own_tokens ? 0 : 1;
    dtrain_tensor *y =
        dtrain_tape_apply(l->tape, desc, inputs + first, 2 - first, NULL, 0, NULL, 0);
    watch(l, y, O_COLUMNS, l->job->other == PACKED ? &of_three : NULL);
    y = dtrain_multiply(l->tape, y, brought(l, l->x[1], l->job->other));
    return dtrain_sum(l->tape, as(l, y, DTRAIN_PLACEMENT_WHOLE));
}

/* It is given the placements that it says it takes; integers are whole, which rows do not go with. */
static void test_own_operation(void)
{
    for (int mode = 0; mode < 3; mode++)
        for (int placement = 0; placement <= PACKED; placement++) {
            const bool rows = placement == DTRAIN_PLACEMENT_ROWS;
            job *j = operation_job(3, 0, placement, false),
                *one = operation_job(1, 0, placement, false);
            j->run = one->run = own;
            j->mode = one->mode = mode;
            j->real = one->real = false;
            run_job(j), run_job(one);
            if ((mode == 0 && placement) || (mode == 2 && rows)) {
                CHECK_MSG(
                    strstr(j->out[2].text, mode ? "own_tokens: expected inputs" : "input 1 is cut"),
                    "%s", j->out[2].text);
                CHECK(j->out[2].error == DTRAIN_ERROR_ARGUMENT);
            } else {
                compare(j, one, 0);
            }
            free(j), free(one);
        }
}

/* ---- overlap ---- */

/* The strategy's no_overlap waits for the sum of d_x at once: the same bits, of numbers that no order suits. */
static void test_no_overlap(void)
{
    for (int i = 1; i < SIZES; i++)
        for (int sequence = 0; sequence < 2; sequence++) {
            job *now = pair_job(sizes[i], HIDDEN, sequence),
                *later = pair_job(sizes[i], HIDDEN, sequence);
            now->real = later->real = now->with_strategy = later->with_strategy = true;
            now->no_plan = later->no_plan = now->no_overlap = true;
            run_job(now), run_job(later);
            for (int r = 0; r < sizes[i]; r++) {
                CHECK_MSG(now->out[r].error == DTRAIN_OK, "%s", now->out[r].text);
                CHECK(memcmp(now->out[r].grad, later->out[r].grad, sizeof now->out[r].grad) == 0);
                CHECK(memcmp(now->out[r].input_grad, later->out[r].input_grad,
                             sizeof now->out[r].input_grad) == 0);
                CHECK(now->out[r].grad[W1][1] != 0);
            }
            free(now), free(later);
        }
}

/* ---- a pass without gradients, rows that do not divide ---- */

static dtrain_tensor *watched_pair(local *l)
{
    dtrain_tensor *h =
        dtrain_linear(l->tape, l->x[0], &l->p[W1], &l->p[B1], DTRAIN_ACTIVATION_RELU);
    dtrain_tensor *y = dtrain_linear(l->tape, h, &l->p[W2], &l->p[B2], DTRAIN_ACTIVATION_SILU);
    watch(l, y, OUT, NULL);
    return dtrain_sum(l->tape, as(l, y, DTRAIN_PLACEMENT_WHOLE));
}

static job *watched_job(int ranks, int64_t rows, bool sequence)
{
    job *j = pair_job(ranks, HIDDEN, sequence);
    j->run = watched_pair;
    j->input_count = 1;
    j->param_count = W3;
    j->shape[0][0] = rows;
    return j;
}

static void test_rows_that_do_not_divide(void)
{
    for (int rows = 5; rows <= 6; rows++) {
        job *j = watched_job(3, rows, true), *one = watched_job(1, rows, false);
        j->flags = one->flags = DTRAIN_TAPE_NO_GRAD;
        run_job(j), run_job(one);
        compare(j, one, 0);
        CHECK(j->out[1].placement[0] ==
              (rows == 6 ? (uint32_t)DTRAIN_PLACEMENT_ROWS : (uint32_t)DTRAIN_PLACEMENT_WHOLE));
        free(j), free(one);
    }
    job *j = watched_job(3, 5, true);
    run_job(j);
    for (int r = 0; r < 3; r++)
        CHECK_MSG(j->out[r].error == DTRAIN_ERROR_ARGUMENT && strstr(j->out[r].text, "5 rows") &&
                      strstr(j->out[r].text, "3 ranks"),
                  "%s", j->out[r].text);
    free(j);
}

/* ---- errors ---- */

enum { P_WHOLE, P_ROWS, P_COLUMNS, P_PACKED, P_BIAS, P_CUT_BIAS };

static dtrain_tensor *wrong(local *l)
{
    dtrain_tape *tape = l->tape;
    dtrain_param *p = l->p;
    dtrain_tensor *x = l->x[0], *columns = as(l, x, DTRAIN_PLACEMENT_COLUMNS);
    dtrain_tensor *rows = as(l, x, DTRAIN_PLACEMENT_ROWS);
    const dtrain_activation none = DTRAIN_ACTIVATION_NONE;
    const int64_t turned[2] = {16, 24};
    const int32_t tokens[4] = {0, 1, 2, 3};
    const int64_t four[2] = {2, 2};
    switch (l->job->mode) {
    case 0: return dtrain_linear(tape, columns, &p[P_WHOLE], NULL, none);
    case 1: return dtrain_linear(tape, columns, &p[P_ROWS], NULL, none);
    case 2: return dtrain_linear(tape, x, &p[P_COLUMNS], NULL, none);
    case 3:
        return dtrain_linear(tape, dtrain_linear(tape, x, &p[P_PACKED], NULL, none), &p[P_COLUMNS],
                             NULL, none);
    case 4: return dtrain_linear(tape, x, &p[P_ROWS], &p[P_BIAS], none);
    case 5: return dtrain_linear(tape, columns, &p[P_COLUMNS], &p[P_CUT_BIAS], none);
    case 6: return dtrain_linear(tape, x, &p[P_WHOLE], &p[P_CUT_BIAS], none);
    case 7: return dtrain_multiply(tape, columns, x);
    case 8: return dtrain_add(tape, rows, columns);
    case 9: return dtrain_sum(tape, columns);
    case 10: return dtrain_layernorm(tape, columns, NULL, &p[P_BIAS], NULL, 1e-5f);
    case 11: return dtrain_layernorm(tape, x, NULL, &p[P_CUT_BIAS], NULL, 1e-5f);
    case 12: return dtrain_rms_norm(tape, rows, NULL, &p[P_BIAS], 1e-5f);
    case 13: return dtrain_linear(tape, rows, &p[P_WHOLE], NULL, none);
    case 14: return dtrain_place(tape, x, (dtrain_placement)7);
    case 15: return dtrain_place(tape, dtrain_sum(tape, x), DTRAIN_PLACEMENT_ROWS);
    case 16: return dtrain_place(tape, dtrain_sum(tape, x), DTRAIN_PLACEMENT_COLUMNS);
    case 17: return dtrain_reshape(tape, columns, 2, turned);
    case 18: return dtrain_reshape(tape, rows, 2, turned);
    case 19: return dtrain_matmul(tape, columns, x);
    case 20: return dtrain_add(tape, columns, dtrain_linear(tape, x, &p[P_PACKED], NULL, none));
    case 21: /* a tape that knows nothing of the mesh */
        tape->groups.tensor_ranks = 1;
        return dtrain_linear(tape, x, &p[P_ROWS], NULL, none);
    default:
        return dtrain_place(tape, dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 2, four, tokens, false),
                            DTRAIN_PLACEMENT_ROWS);
    }
}

static void test_errors(void)
{
    static const char *const words[][3] = {
        {"input 1 is cut by columns", "expected input 1 whole", "dtrain_place"},
        {"input 1 is cut by columns", "expected input 1 whole", "dtrain_place"},
        {"input 1 is whole", "DTRAIN_PLACEMENT_COLUMNS", "dtrain_place"},
        {"0-1 and 5-9 of 16", "p2 is cut by columns, on this rank 0-7 of 16", "the same parts"},
        {"p4 is whole", "the same cut", "0-7 of 16"},
        {"p5 is cut by rows", "0-7 of 16", "no cut"},
        {"p5 is cut by rows", "0-7 of 16", "no cut"},
        {"dtrain_multiply: expected", "1 is cut by columns", "2 is whole"},
        {"dtrain_add: expected", "1 is cut by rows", "2 is cut by columns"},
        {"dtrain_sum: expected input 1 whole;", "input 1 is cut by columns", ""},
        {"dtrain_layernorm: expected", "or cut by rows", "input 1 is cut by columns"},
        {"dtrain_layernorm: expected", "cut of p5 zeroed", "p5 is cut by rows"},
        {"dtrain_rms_norm: the gradient of parameter p4", "sequence_parallel", ""},
        {"dtrain_linear: the gradient of parameter p0", "sequence_parallel", ""},
        {"placement is 7", "", ""},
        {"1 rows to share", "2 ranks", ""},
        {"1 columns to share", "2 ranks", ""},
        {"dtrain_reshape: of a part", "last one stays", "input 1 is cut by columns"},
        {"dtrain_reshape: of a part", "two axes", "input 1 is cut by rows"},
        {"dtrain_matmul: expected input 1 whole;", "input 1 is cut by columns", ""},
        {"dtrain_add: expected", "the same parts", "0-1 and 5-9 of 16"},
        {"p1 has 128 elements", "needs 256", "mesh"},
        {"dtrain_place: input 1 is i32", "", ""}};
    for (int mode = 0; mode < (int)(sizeof words / sizeof *words); mode++) {
        job *j = job_new(wrong, 2);
        j->mode = mode;
        input(j, ROWS, 16, false);
        param(j, 16, 16, DTRAIN_CUT_NONE);
        param(j, 16, 16, DTRAIN_CUT_ROWS);
        param(j, 16, 16, DTRAIN_CUT_COLUMNS);
        param(j, 16, 16, DTRAIN_CUT_ROWS)->cut = of_three;
        j->specs[P_PACKED].cut.widths[0] = 5, j->specs[P_PACKED].cut.widths[1] = 11;
        param(j, 16, 0, DTRAIN_CUT_NONE);
        param(j, 16, 0, DTRAIN_CUT_ROWS);
        j->no_plan = true;
        run_job(j);
        for (int r = 0; r < 2; r++) {
            const seen *out = &j->out[r];
            CHECK_MSG(out->error != DTRAIN_OK, "case %d is no error", mode);
            for (int w = 0; w < 3 && r == 0; w++)
                CHECK_MSG(strstr(out->text, words[mode][w]), "case %d: \"%s\" without \"%s\"", mode,
                          out->text, words[mode][w]);
        }
        free(j);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_pair_integers);
    RUN(test_pair_in_double);
    RUN(test_conversions);
    RUN(test_operations);
    RUN(test_bytes);
    RUN(test_own_operation);
    RUN(test_no_overlap);
    RUN(test_rows_that_do_not_divide);
    RUN(test_errors);
    return test_summary();
}
