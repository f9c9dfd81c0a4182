/* Random programs: worlds, models, strategies and steps in which ranks differ from one another in
 * everything that the documentation lets them differ in, against plain loops in double precision.
 *
 *     build/tests/test_programs                        the seeds that ever failed, then 300 new ones,
 *                                                 100 on emulated GPUs;
 *                                                 with DTRAIN_TEST_FULL=1 20 seconds of new ones
 *     build/tests/test_programs --count 10000          so many new ones; they are printed to be repeated
 *     build/tests/test_programs --seconds 120          as many as fit
 *     build/tests/test_programs --seed 77              this one, in words; if it fails it is shrunk
 *     mpirun -n 4 build/mpi/test_programs --count 100  over MPI, each with four ranks; the first failure ends it
 *
 * A program is a pure function of its seed: every decision of a rank is drawn from (seed, what, rank,
 * step, micro-batch, parameter), so that the oracle can take it too. What ranks may do differently: lack
 * gradients, single ones or all of a unit or of a micro-batch; mark them in another order; own the memory
 * of some; have micro-batches of more or fewer samples, or of none; step over units in backward; gather one
 * twice; come late; look (query) at any moment; ask in the middle of a backward for what belongs between two
 * steps, and are refused; join where they have no samples. All
 * ranks together read, verify and evaluate between forward and backward, and between steps, and make the activations
 * of some units again in a backward, whatever units each has stepped over by then. In one program of
 * twelve a rank gives up in the middle: then the others end with an error that says so, at once. Gradients
 * are small multiples of 1/8: sums of them are exact in every order and dtype.
 *
 * build/emu/test_programs is the same with emulated GPUs: two programs of three share one and exchange through
 * host memory, in the third each rank has its own and they talk over dtrain_nccl.h and the mock of NCCL. */
#include "test.h"

#include "dtrain.h"
#ifdef DTRAIN_CUDA_EMULATION
#define DTRAIN_NCCL_LINKED
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"
#endif
#include "ranks.h"
#include "seeds.h"
#ifdef DTRAIN_CUDA_EMULATION
#include "nccl/mock/nccl_mock.c"
#include "nccl/mock/emulated_device.h"
#endif
#ifdef DTRAIN_USE_MPI
#include <mpi.h>
#endif

#ifdef DTRAIN_CUDA_EMULATION
enum { MANY = 100 };
#else
enum { MANY = 300 };
#endif
enum { MOST_RANKS = 8, MOST_PARAMS = 14, MOST_STEPS = 4, MOST_MICRO = 4, MOST_UNITS = 6 };
static const float RATE = 0.125f; /* of the update: value -= RATE * mean gradient */

typedef struct param_plan {
    int64_t count, first; /* first: its elements in the oracle's arrays */
    uint32_t unit, flags;
    int storage;         /* index of the parameter whose memory it shares, itself in most cases */
    bool host_value;     /* the program's own memory, where the kind allows it */
    uint32_t host_grads; /* bit r: rank r owns the memory of its gradient */
} param_plan;

typedef struct program {
    uint64_t seed;
    int ranks, params, units, steps, micro;
    uint32_t mode;
    dtrain_strategy_desc desc;
    dtrain_compression_desc compression;
    uint32_t no_overlap; /* bit r */
    param_plan p[MOST_PARAMS];
    /* One decision in so many; 0: never. */
    uint64_t lacks, lacks_unit, lacks_all, stragglers, looks, own_order, repeats, again, odd;
    int quitter, quit_step; /* a rank that gives up in the middle of this step; -1: none */
    int64_t elements;       /* of all storages */
    bool weighted;          /* micro-batches have samples of different numbers */
    bool joins;             /* a rank without samples calls dtrain_strategy_join alone */
    bool adamw;             /* of the library, which leaves absent parameters alone */
    bool nccl;              /* on emulated GPUs; else staged */
    char note[16];          /* what shrinking took away */
} program;

/* What ranks tell and what they are told; in shared memory, behind it the oracle's arrays. */
typedef struct report {
    int outcome[MOST_RANKS]; /* 0: not reported; 1: as expected; 2: not */
    char text[MOST_RANKS][400];
    bool fails[MOST_STEPS];       /* finish must refuse this step, for a missing gradient */
    bool empty[MOST_STEPS];       /* no micro-batch of this step has samples */
    uint32_t present[MOST_STEPS]; /* bit p: some rank has a gradient of this storage */
    int misuses;                  /* of NCCL, and what it still holds at the end */
    double tolerance, gathered_tolerance;
    double data[]; /* mean (steps, elements), base (elements) */
} report;

typedef struct play {
    const program *g;
    report *r;
} play;

/* ---- Decisions ------------------------------------------------------------------------------------*/

enum {
    GRAD = 1,
    LACKS,
    LACKS_UNIT,
    LACKS_ALL,
    LATE,
    LOOK,
    ORDER,
    REPEAT,
    SKIP_GATHER,
    TOGETHER,
    NCCL,
    DELAY,
    POLLS,
    AGAIN,
    ODD,
    RATES,
    WEIGHT,
    MISSING
};

static uint64_t draw(const program *g, uint64_t what, int rank, int step, int micro, int64_t item)
{
    uint64_t x = ranks_mix(g->seed * 31 + what);
    x = ranks_mix(x + (uint64_t)rank * 1000003u + (uint64_t)step * 1009u + (uint64_t)micro * 101u);
    return ranks_mix(x + (uint64_t)item);
}
static bool one_in(const program *g, uint64_t rate, uint64_t what, int rank, int step, int micro,
                   int64_t item)
{
    return rate && draw(g, what, rank, step, micro, item) % rate == 0;
}

static bool trainable(const program *g, int p)
{
    return !((g->p[p].flags | g->p[g->p[p].storage].flags) & DTRAIN_PARAM_FROZEN);
}
/* A rank without samples in this micro-batch: it calls finish alone. */
static bool idle(const program *g, int rank, int step, int micro)
{
    return one_in(g, g->lacks_all, LACKS_ALL, rank, step, micro, 0);
}
static bool has_gradient(const program *g, int rank, int step, int micro, int p)
{
    return trainable(g, p) && !idle(g, rank, step, micro) &&
           !one_in(g, g->lacks_unit, LACKS_UNIT, rank, step, micro, g->p[p].unit) &&
           !one_in(g, g->lacks, LACKS, rank, step, micro, p);
}
static float gradient(const program *g, int rank, int step, int micro, int p, int64_t i)
{
    return (float)((int64_t)(draw(g, GRAD, rank, step, micro, p * 65536 + i) % 17) - 8) / 8;
}

/* The samples of a micro-batch, in units; and what they weigh. */
static float samples_of(const program *g, int rank, int step, int micro)
{
    static const float weights[] = {0, 0, 0.25f, 0.5f, 1, 1, 1.5f, 3};
    if (g->joins && idle(g, rank, step, micro)) return 0;
    return g->weighted ? weights[draw(g, WEIGHT, rank, step, micro, 0) % 8] : 1;
}
static float weight(const program *g, int rank, int step, int micro)
{
    return samples_of(g, rank, step, micro);
}

/* ---- Oracle ---------------------------------------------------------------------------------------*/

static double *mean_of(const play *y, int step, int p)
{
    return y->r->data + (int64_t)step * y->g->elements + y->g->p[p].first;
}
static double *base_of(const play *y, int p) { return mean_of(y, y->g->steps, p); }

/* The mean over ranks of what their micro-batches add up to, element by element, and over samples
 * where those differ. */
static void oracle(const play *y)
{
    const program *g = y->g;
    for (int step = 0; step < g->steps; step++) {
        bool missing = false;
        for (int rank = 0; rank < g->ranks; rank++) {
            float samples = 0;
            for (int micro = 0; micro < g->micro; micro++) samples += weight(g, rank, step, micro);
            for (int p = 0; p < g->params; p++) {
                bool seen = !trainable(g, p) || g->p[p].count == 0 || samples == 0;
                for (int micro = 0; micro < g->micro; micro++) {
                    if (!has_gradient(g, rank, step, micro, p)) continue;
                    seen = true;
                    double *mean = mean_of(y, step, g->p[p].storage);
                    for (int64_t i = 0; i < g->p[p].count; i++)
                        mean[i] += (double)gradient(g, rank, step, micro, p, i) / g->ranks;
                }
                missing = missing || !seen;
            }
        }
        y->r->fails[step] = missing && g->desc.missing_gradient == DTRAIN_MISSING_GRADIENT_ERROR;
        double weights = 0;
        for (int rank = 0; rank < g->ranks; rank++)
            for (int micro = 0; micro < g->micro; micro++) {
                weights += (double)weight(g, rank, step, micro);
                for (int p = 0; p < g->params; p++)
                    if (has_gradient(g, rank, step, micro, p))
                        y->r->present[step] |= 1u << g->p[p].storage;
            }
        y->r->empty[step] = weights == 0;
        if (g->desc.missing_gradient != DTRAIN_MISSING_GRADIENT_SKIP) y->r->present[step] = ~0u;
        for (int64_t i = 0; i < g->elements && weights > 0; i++)
            y->r->data[step * g->elements + i] *= g->ranks * g->micro / weights;
    }
}

static dtrain_optimizer_desc adamw_desc(void)
{
    dtrain_optimizer_desc desc = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    desc.epsilon = 0.25f; /* a gradient near 0 that is rounded moves a value by less than that */
    desc.weight_decay = 0.1f;
    return desc;
}

/* What AdamW makes of an element in the steps before this one, as torch counts them: a parameter
 * that nobody has a gradient of is not touched. */
static double adamw_value(const play *y, int step, int p, int64_t i)
{
    const dtrain_optimizer_desc d = adamw_desc();
    const double b1 = (double)d.beta1, b2 = (double)d.beta2, rate = (double)RATE;
    double value = base_of(y, p)[i], m = 0, v = 0;
    int updates = 0;
    for (int s = 0; s < step; s++) {
        const double grad = mean_of(y, s, p)[i];
        if (y->r->fails[s] || y->r->empty[s] || !trainable(y->g, p)) continue;
        if (!(y->r->present[s] >> p & 1)) continue;
        updates++;
        m = b1 * m + (1 - b1) * grad;
        v = b2 * v + (1 - b2) * grad * grad;
        value *= 1 - rate * (double)d.weight_decay;
        value -= rate * m / (1 - pow(b1, updates)) /
                 (sqrt(v / (1 - pow(b2, updates))) + (double)d.epsilon);
    }
    return value;
}

/* The value of an element before a step; a step that fails updates nothing. */
static double value_of(const play *y, int step, int p, int64_t i)
{
    double value = base_of(y, p)[i];
    if (y->g->adamw) return adamw_value(y, step, p, i);
    for (int s = 0; s < step; s++)
        if (!y->r->fails[s]) value -= (double)RATE * mean_of(y, s, p)[i];
    return value;
}

/* ---- A rank ---------------------------------------------------------------------------------------*/

typedef struct rank_state {
    play y;
    int rank;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer; /* NULL: updates are the program's own */
    dtrain_param params[MOST_PARAMS];
    dtrain_device *device;
    float *memory, *host; /* the model's own arrays, of the device; scratch of this program */
    dtrain_result copied; /* the last look */
} rank_state;

/* What is in an array of the device, as many floats as scratch has room for; and the way back. */
static const float *look_at(rank_state *s, const float *array, int64_t count)
{
    s->copied = dtrain_device_copy(s->device, s->host, array, (size_t)count * sizeof(float));
    return s->copied == DTRAIN_OK ? s->host : NULL;
}
static dtrain_result put_back(rank_state *s, float *array, int64_t count)
{
    return dtrain_device_copy(s->device, array, s->host, (size_t)count * sizeof(float));
}

static int wrong(rank_state *s, const char *format, ...)
{
    const size_t room = sizeof s->y.r->text[0];
    va_list args;
    va_start(args, format);
    vsnprintf(s->y.r->text[s->rank], room, format, args);
    va_end(args);
    s->y.r->outcome[s->rank] = 2;
    return 1;
}
/* With NCCL a copy, which waits for the device, is where a rank hears of another one's end. */
static int no_copy(rank_state *s, int step)
{
    return wrong(s, "step %d: a copy: %s: %.250s", step, dtrain_result_text(s->copied),
                 dtrain_last_error());
}
#define GOOD(call)                                                                    \
    do {                                                                              \
        const dtrain_result good_result = (call);                                     \
        if (good_result != DTRAIN_OK)                                                 \
            return wrong(s, "%s: %s: %.250s", #call, dtrain_result_text(good_result), \
                         dtrain_last_error());                                        \
    } while (0)
#define STEP(call)          \
    do {                    \
        if (call) return 1; \
    } while (0)

static bool is_close(double a, double b, double tolerance)
{
    const double size = fabs(b) > 1 ? fabs(b) : 1;
    return fabs(a - b) <= tolerance * size;
}

static bool exact(const program *g)
{
    return !g->compression.kind || g->compression.dense_steps > (uint64_t)g->steps;
}

/* Compares a value that is whole here with the oracle's. */
static int check_value(rank_state *s, int p, const float *value, int step, bool gathered,
                       const char *when)
{
    const program *g = s->y.g;
    const int storage = g->p[p].storage;
    const double tolerance = gathered ? s->y.r->gathered_tolerance : s->y.r->tolerance;
    if (!value) return wrong(s, "step %d, %s: parameter %d has no value", step, when, p);
    if (value != s->host) value = look_at(s, value, g->p[p].count);
    if (!value) return no_copy(s, step);
    for (int64_t i = 0; i < g->p[p].count && exact(g); i++) {
        const double expected = value_of(&s->y, step, storage, i);
        if (!is_close((double)value[i], expected, tolerance))
            return wrong(s, "step %d, %s: parameter %d[%lld] is %.9g, expected %.9g", step, when, p,
                         (long long)i, (double)value[i], expected);
    }
    return 0;
}

static int check_unit(rank_state *s, uint32_t unit, int step, const char *when)
{
    const program *g = s->y.g;
    for (int p = 0; p < g->params; p++)
        if (g->p[p].unit == unit) STEP(check_value(s, p, s->params[p].value, step, true, when));
    return 0;
}

/* What a rank may do by itself, at any moment. */
static void alone(rank_state *s, int step, int micro, int64_t where)
{
    const program *g = s->y.g;
    dtrain_strategy_info info;
    if (one_in(g, g->stragglers, LATE, s->rank, step, micro, where))
        ranks_sleep_us((long)(draw(g, LATE, s->rank, step, micro, where) >> 8) & 2047);
    if (one_in(g, g->looks, LOOK, s->rank, step, micro, where))
        dtrain_strategy_query(s->strategy, &info);
}

/* A forward pass; with hold its last unit stays gathered, as a tape leaves it. */
static int forward(rank_state *s, int step, bool hold, const char *when)
{
    const program *g = s->y.g;
    for (uint32_t u = 0; u < (uint32_t)g->units; u++) {
        GOOD(dtrain_strategy_gather(s->strategy, u, DTRAIN_PASS_FORWARD));
        STEP(check_unit(s, u, step, when));
        if (!hold || u + 1 < (uint32_t)g->units) GOOD(dtrain_strategy_release(s->strategy, u));
    }
    return 0;
}

static int read_all(rank_state *s, int step)
{
    for (int p = 0; p < s->y.g->params; p++) {
        GOOD(dtrain_strategy_read(s->strategy, (size_t)p, s->host));
        STEP(check_value(s, p, s->host, step, false, "read"));
    }
    return 0;
}

/* What all ranks do at the same place, and not often. */
static int together(rank_state *s, int step, int micro, int64_t where)
{
    const program *g = s->y.g;
    if (g->joins && where == 0) return 0; /* whoever joins is past it */
    const uint64_t what = g->looks ? draw(g, TOGETHER, 0, step, micro, where) % (4 * g->looks) : 99;
    if (what == 0) return forward(s, step, false, "evaluation");
    if (what == 1) return read_all(s, step);
    if (what == 2) GOOD(dtrain_strategy_verify(s->strategy, NULL));
    return 0;
}

/* Asks in the middle of a backward for what belongs between steps. */
static int odd_call(rank_state *s, int step, int micro, int64_t where)
{
    const program *g = s->y.g;
    const dtrain_shard *shards;
    size_t count;
    if (!one_in(g, g->odd, ODD, s->rank, step, micro, where)) return 0;
    const uint64_t call = draw(g, ODD, s->rank, step, micro, 1000 + where) % 5;
    const bool more = micro + 1 < g->micro;
    const dtrain_result result = call == 0   ? dtrain_strategy_accumulate(s->strategy, !more)
                                 : call == 1 ? dtrain_strategy_shards(s->strategy, &shards, &count)
                                 : call == 2 ? dtrain_strategy_publish(s->strategy)
                                 : call == 3 ? dtrain_strategy_verify(s->strategy, NULL)
                                             : dtrain_strategy_read(s->strategy, 0, s->host);
    if (result != DTRAIN_ERROR_USAGE && result != DTRAIN_ERROR_PEER)
        return wrong(s, "step %d: call %d in the middle of a backward: %s", step, (int)call,
                     dtrain_result_text(result));
    GOOD(dtrain_strategy_accumulate(s->strategy, more)); /* no change */
    return 0;
}

/* Adds this rank's gradient of one entry as a host's own backward does, and marks it. */
static int contribute(rank_state *s, int step, int micro, int p)
{
    const program *g = s->y.g;
    dtrain_param *q = &s->params[p];
    if (!q->grad) return wrong(s, "step %d: parameter %d has no gradient's memory", step, p);
    if (!look_at(s, q->grad, g->p[p].count)) return no_copy(s, step);
    for (int64_t i = 0; i < g->p[p].count; i++) {
        const float part = gradient(g, s->rank, step, micro, p, i);
        s->host[i] = q->state.grad_written ? s->host[i] + part : part;
    }
    GOOD(put_back(s, q->grad, g->p[p].count));
    alone(s, step, micro, 100 + p);
    GOOD(dtrain_strategy_ready(s->strategy, (size_t)p));
    return odd_call(s, step, micro, p);
}

/* The order in which this rank's gradients become ready: backwards, or any where units need none. */
static int order_of(const rank_state *s, int step, int micro, uint32_t unit, int *order)
{
    const program *g = s->y.g;
    int count = 0;
    for (int p = g->params - 1; p >= 0; p--)
        if ((unit == UINT32_MAX || g->p[p].unit == unit) &&
            has_gradient(g, s->rank, step, micro, p))
            order[count++] = p;
    for (int i = count - 1; i > 0 && one_in(g, g->own_order, ORDER, s->rank, step, micro, unit);
         i--) {
        const int k = (int)(draw(g, ORDER, s->rank, step, micro, 1000 + i) % (uint64_t)(i + 1));
        const int kept = order[i];
        order[i] = order[k], order[k] = kept;
    }
    return count;
}

/* Begins a backward and leaves it: what it returns ends the rank, and the others must hear of it. */
static int give_up(rank_state *s, int step, int micro)
{
    const uint32_t unit = (uint32_t)s->y.g->units - 1;
    int order[MOST_PARAMS];
    const int count = order_of(s, step, micro, unit, order);
    GOOD(dtrain_strategy_gather(s->strategy, unit, DTRAIN_PASS_BACKWARD));
    for (int i = 0; i < count; i++) STEP(contribute(s, step, micro, order[i]));
    s->y.r->outcome[s->rank] = 1;
    return 3;
}

/* How many units, of which u is the last, make their activations again before u's backward: the same on all ranks. */
static uint32_t again(const program *g, int step, int micro, uint32_t u)
{
    if (!one_in(g, g->again, AGAIN, 0, step, micro, u)) return 0;
    return 1 + (uint32_t)(draw(g, AGAIN, 0, step, micro, 1000 + u) % (u + 1));
}

/* Makes them again. The last is gathered for backward before, if it must be: there are more than two, or this rank
 * has gathered none so far and the first one would begin another pass. */
static int activations(rank_state *s, int step, int micro, uint32_t u, bool *begun)
{
    const program *g = s->y.g;
    const uint32_t count = again(g, step, micro, u);
    if (!count) return 0;
    if (count > 2 || (count == u + 1 && !*begun) || draw(g, AGAIN, 0, step, micro, 2000 + u) % 2) {
        GOOD(dtrain_strategy_gather(s->strategy, u, DTRAIN_PASS_BACKWARD));
        *begun = true;
    }
    for (uint32_t unit = u + 1 - count; unit <= u; unit++) {
        GOOD(dtrain_strategy_gather(s->strategy, unit, DTRAIN_PASS_FORWARD));
        STEP(check_unit(s, unit, step, "forward again"));
        GOOD(dtrain_strategy_release(s->strategy, unit));
    }
    if (u + 1 - count < (uint32_t)g->units - 1) *begun = true;
    return 0;
}

static int backward(rank_state *s, int step, int micro)
{
    const program *g = s->y.g;
    const bool whole = g->desc.kind <= DTRAIN_STRATEGY_ZERO1;
    const bool single =
        g->desc.kind == DTRAIN_STRATEGY_HYBRID_SHARD ? g->desc.node_size == 1 : g->ranks == 1;
    const bool walks = !whole && !single && /* a gather begins a backward */
                       !(g->desc.kind == DTRAIN_STRATEGY_SHARD_GRAD_OP &&
                         g->desc.accumulation == DTRAIN_ACCUMULATION_LAST);
    bool begun = false;
    const bool anyhow = one_in(g, 2, SKIP_GATHER, s->rank, step, micro, -1);
    int order[MOST_PARAMS];
    if (s->rank == g->quitter && step == g->quit_step && micro == g->micro / 2)
        return give_up(s, step, micro);
    if (idle(g, s->rank, step, micro) && !g->again) return 0;
    if (whole && anyhow) { /* gather is not needed */
        const int count = order_of(s, step, micro, UINT32_MAX, order);
        for (int i = 0; i < count; i++) STEP(contribute(s, step, micro, order[i]));
        return 0;
    }
    for (uint32_t u = (uint32_t)g->units; u-- > 0;) {
        const int count = order_of(s, step, micro, u, order);
        const bool first = u == 1 && !begun && g->again; /* before a forward of unit 0 */
        STEP(activations(s, step, micro, u, &begun));
        if (count == 0 && !first && one_in(g, 2, SKIP_GATHER, s->rank, step, micro, u)) continue;
        GOOD(dtrain_strategy_gather(s->strategy, u, DTRAIN_PASS_BACKWARD));
        begun = true;
        if (walks) STEP(odd_call(s, step, micro, -2 - (int64_t)u));
        STEP(check_unit(s, u, step, "backward"));
        for (int i = 0; i < count; i++) {
            STEP(contribute(s, step, micro, order[i]));
            if (one_in(g, g->repeats, REPEAT, s->rank, step, micro, order[i]))
                GOOD(dtrain_strategy_gather(s->strategy, u, DTRAIN_PASS_BACKWARD));
        }
        GOOD(dtrain_strategy_release(s->strategy, u));
    }
    return 0;
}

static int check_gradients(rank_state *s, int step)
{
    const program *g = s->y.g;
    const dtrain_shard *shards;
    size_t count;
    GOOD(dtrain_strategy_shards(s->strategy, &shards, &count));
    for (size_t k = 0; k < count; k++) {
        const int p = (int)(shards[k].param - s->params);
        const int64_t size = shards[k].count;
        float *const updates = s->host + g->elements;
        if (!look_at(s, shards[k].grad, size)) return no_copy(s, step);
        for (int64_t i = 0; i < size && exact(g); i++) {
            const double expected = mean_of(&s->y, step, p)[shards[k].offset + i];
            if (!is_close((double)s->host[i], expected, s->y.r->tolerance))
                return wrong(s, "step %d: gradient of parameter %d[%lld] is %.9g, expected %.9g",
                             step, p, (long long)(shards[k].offset + i), (double)s->host[i],
                             expected);
        }
        if (s->optimizer) continue;
        for (int64_t i = 0; i < size; i++) updates[i] = RATE * s->host[i];
        if (!look_at(s, shards[k].value, size)) return no_copy(s, step);
        for (int64_t i = 0; i < size; i++) s->host[i] -= updates[i];
        GOOD(put_back(s, shards[k].value, size));
    }
    return 0;
}

static int train(rank_state *s)
{
    const program *g = s->y.g;
    for (int step = 0; step < g->steps; step++) {
        dtrain_result result = DTRAIN_OK;
        for (int micro = 0; micro < g->micro; micro++) {
            bool over;
            GOOD(dtrain_strategy_accumulate(s->strategy, micro + 1 < g->micro));
            if (g->joins && idle(g, s->rank, step, micro) && s->rank != g->quitter) {
                alone(s, step, micro, 1);
                result = dtrain_strategy_join(s->strategy, &over);
                if (result == DTRAIN_OK && micro + 1 == g->micro && over != s->y.r->empty[step])
                    return wrong(s, "step %d: join says that it is%s over", step,
                                 over ? "" : " not");
                if (micro + 1 < g->micro) GOOD(result);
                if (micro + 1 < g->micro) STEP(together(s, step, micro, 1));
                continue;
            }
            STEP(forward(s, step, one_in(g, 2, TOGETHER, 0, step, micro, -1), "forward"));
            STEP(together(s, step, micro, 0));
            STEP(backward(s, step, micro));
            alone(s, step, micro, 1);
            if (g->weighted || g->joins)
                GOOD(dtrain_strategy_weight(s->strategy, samples_of(g, s->rank, step, micro)));
            result = dtrain_strategy_finish(s->strategy);
            if (micro + 1 < g->micro) GOOD(result);
            if (micro + 1 < g->micro) STEP(together(s, step, micro, 1));
        }
        if (s->y.r->fails[step]) {
            if (result != DTRAIN_ERROR_USAGE)
                return wrong(s, "step %d: finish gives %s, and a gradient is missing", step,
                             dtrain_result_text(result));
            continue;
        }
        if (result != DTRAIN_OK)
            return wrong(s, "step %d: finish: %s: %.250s", step, dtrain_result_text(result),
                         dtrain_last_error());
        STEP(together(s, step, 0, 2));
        STEP(check_gradients(s, step));
        if (s->optimizer) GOOD(dtrain_optimizer_step(s->optimizer, RATE, 1));
        else GOOD(dtrain_strategy_publish(s->strategy));
        STEP(together(s, step + 1, 0, 3));
    }
    GOOD(dtrain_strategy_verify(s->strategy, NULL));
    return read_all(s, g->steps);
}

/* Registers the model, whose values are drawn by the library or filled in here. */
static void register_model(rank_state *s)
{
    static const char *const names[MOST_PARAMS] = {"p0", "p1", "p2", "p3",  "p4",  "p5",  "p6",
                                                   "p7", "p8", "p9", "p10", "p11", "p12", "p13"};
    const program *g = s->y.g;
    float *at = s->memory;
    for (int p = 0; p < g->params; p++) {
        const param_plan *plan = &g->p[p];
        dtrain_param *q = &s->params[p];
        memset(q, 0, sizeof *q);
        q->name = names[p];
        q->count = plan->count;
        if (g->adamw) q->shape[0] = plan->count, q->shape[1] = 1; /* a matrix: decayed */
        q->unit = plan->unit;
        q->flags = plan->flags;
        q->init = DTRAIN_INIT_UNIFORM;
        q->init_scale = 1;
        if (plan->storage != p) q->alias_of = &s->params[plan->storage];
        else if (plan->host_value) {
            q->value = at;
            for (int64_t i = 0; i < plan->count; i++)
                s->host[i] = gradient(g, s->rank, 77, 0, p, i);
            put_back(s, at, plan->count);
            at += plan->count;
        }
        if (plan->storage == p && !(plan->flags & DTRAIN_PARAM_FROZEN) &&
            (plan->host_grads >> s->rank & 1))
            q->grad = at, at += plan->count;
    }
}

#ifdef DTRAIN_USE_MPI
enum { OVER_MPI = 1 };
#else
enum { OVER_MPI = 0 };
#endif
static int
    mpi_ranks; /* over MPI a world has all ranks of mpirun, and each rank has a report of its own */

static int rank_main(dtrain_world *world, void *user)
{
    const play *y = (const play *)user;
    const program *g = y->g;
    rank_state *s = (rank_state *)calloc(1, sizeof *s);
    dtrain_strategy_desc desc = g->desc;
    int result = 1;
    s->y = *y;
    s->rank = dtrain_world_rank(world);
    s->device = dtrain_world_device(world);
    s->host = (float *)calloc(2 * (size_t)g->elements + 64, sizeof(float));
    const size_t bytes = (2 * (size_t)g->elements + 64) * sizeof(float);
    void *memory;
    if (s->device->ops->alloc(s->device, bytes, &memory) != DTRAIN_OK) return 2;
    s->memory = (float *)memory;
    register_model(s);
    desc.no_overlap = g->no_overlap >> s->rank & 1;
    desc.compression = g->compression.kind ? &g->compression : NULL;
    if (dtrain_strategy_create(world, s->params, (size_t)g->params, &desc, &s->strategy) !=
        DTRAIN_OK)
        wrong(s, "create: %.350s", dtrain_last_error());
    else {
        const dtrain_optimizer_desc adamw = adamw_desc();
        if (g->adamw &&
            dtrain_optimizer_create(world, s->strategy, &adamw, &s->optimizer) != DTRAIN_OK)
            wrong(s, "optimizer: %.350s", dtrain_last_error());
        for (int p = 0; p < g->params; p++)
            if (g->p[p].storage == p) {
                if (dtrain_strategy_read(s->strategy, (size_t)p, s->host) != DTRAIN_OK) break;
                for (int64_t i = 0; i < g->p[p].count && (s->rank == 0 || OVER_MPI); i++)
                    base_of(y, p)[i] = (double)s->host[i];
            }
        result = dtrain_barrier(dtrain_world_comm(world)) == DTRAIN_OK ? train(s) : 1;
        if (result == 0) y->r->outcome[s->rank] = 1;
    }
    dtrain_optimizer_destroy(s->optimizer);
    dtrain_strategy_destroy(s->strategy);
    s->device->ops->free(s->device, s->memory, bytes);
    free(s->host);
    free(s);
    return result;
}

/* ---- A program from its seed ----------------------------------------------------------------------*/

static uint64_t pick(uint64_t *state, uint64_t limit)
{
    *state = ranks_mix(*state);
    return (*state >> 16) % limit;
}
/* 0: never; otherwise one decision in so many. */
static uint64_t rate(uint64_t *state)
{
    static const uint64_t rates[] = {0, 0, 2, 3, 5, 10};
    return rates[pick(state, 6)];
}

static void generate_model(program *g, uint64_t *state, bool own_values)
{
    uint32_t unit = 0;
    g->params = 1 + (int)pick(state, MOST_PARAMS);
    for (int p = 0; p < g->params; p++) {
        param_plan *plan = &g->p[p];
        static const int64_t sizes[] = {1, 7, 33, 64, 200, 1000, 5000, 20000};
        plan->count =
            1 + (int64_t)pick(state, (uint64_t)sizes[pick(state, pick(state, 6) ? 6 : 8)]);
        plan->storage = p;
        if (p && unit + 1 < MOST_UNITS && pick(state, 3)) unit++;
        plan->unit = unit;
        plan->flags = pick(state, 8) == 0 ? DTRAIN_PARAM_FROZEN : 0;
        if (p && pick(state, 5) == 0) {
            plan->storage = g->p[pick(state, (uint64_t)p)].storage;
            plan->count = g->p[plan->storage].count;
        }
        plan->host_value = own_values && pick(state, 3) == 0;
        plan->host_grads = pick(state, 2) ? (uint32_t)pick(state, 256) : 0;
    }
    g->units = (int)unit + 1;
}

static void generate_desc(program *g, uint64_t *state)
{
    dtrain_strategy_desc *d = &g->desc;
    const bool sharded = d->kind >= DTRAIN_STRATEGY_FULL_SHARD;
    const bool hybrid = d->kind == DTRAIN_STRATEGY_HYBRID_SHARD;
    uint32_t divisors[8], count = 0;
    for (uint32_t n = 1; n <= (uint32_t)g->ranks; n++)
        if ((uint32_t)g->ranks % n == 0) divisors[count++] = n;
    d->missing_gradient = pick(state, 4) == 0;
    if (d->kind >= DTRAIN_STRATEGY_SHARD_GRAD_OP && pick(state, 3) == 0)
        d->accumulation = 1 + (uint32_t)pick(state, hybrid ? 3 : 2);
    if (pick(state, 4) == 0) d->reduce_dtype = DTRAIN_DTYPE_BF16 + (uint32_t)pick(state, 2);
    if (sharded && pick(state, 4) == 0)
        d->param_dtype = DTRAIN_DTYPE_BF16 + (uint32_t)pick(state, 2);
    if (hybrid) d->node_size = divisors[pick(state, count)];
    else if (d->kind != DTRAIN_STRATEGY_ZERO3 && pick(state, 4) == 0) {
        d->hierarchical = true;
        d->node_size = divisors[pick(state, count)];
    }
    if (sharded && pick(state, 3) == 0) d->keep_after_forward = true;
    /* Draws of settings that are gone: the seeds below still mean the same programs. */
    for (int u = 0; sharded && u < g->units; u++) (void)pick(state, 4);
    if (d->kind >= DTRAIN_STRATEGY_ZERO1 && pick(state, 3) == 0) (void)pick(state, 1000);
    if (pick(state, 2)) d->bucket_bytes = 64 + (size_t)pick(state, 20000);
    if (pick(state, 2)) (void)pick(state, 4000);
    g->no_overlap =
        sharded ? (pick(state, 3) ? 0 : 255) : (uint32_t)(pick(state, 256) & pick(state, 256));
    if (d->kind == DTRAIN_STRATEGY_DDP && pick(state, 3) == 0) {
        g->compression.kind = DTRAIN_COMPRESSION_TOPK;
        (void)pick(state, 2);
        g->compression.dense_steps = pick(state, 2) ? 100 : 1;
        g->compression.topk_ratio = 0.1f;
        g->compression.dense_below = 1 + (int64_t)pick(state, 100);
    }
}

static program generate(uint64_t seed)
{
    program g;
    uint64_t state = ranks_mix(seed);
    memset(&g, 0, sizeof g);
    g.seed = seed;
    g.ranks = 1 + (int)pick(&state, pick(&state, 4) ? 4 : MOST_RANKS);
    if (OVER_MPI) g.ranks = mpi_ranks;
    g.mode = pick(&state, 2) ? DTRAIN_LAUNCH_PROCESSES : DTRAIN_LAUNCH_THREADS;
    g.steps = 1 + (int)pick(&state, MOST_STEPS);
    g.micro = 1 + (int)pick(&state, MOST_MICRO);
    g.desc.kind = DTRAIN_STRATEGY_DDP + (uint32_t)pick(&state, 6);
    g.desc.init_seed = seed;
    generate_model(&g, &state, g.desc.kind <= DTRAIN_STRATEGY_SHARD_GRAD_OP);
    generate_desc(&g, &state);
    g.lacks = rate(&state), g.lacks_unit = rate(&state), g.lacks_all = rate(&state);
    g.stragglers = rate(&state), g.looks = rate(&state), g.own_order = rate(&state);
    g.repeats = rate(&state);
    g.quitter = pick(&state, 12) ? -1 : (int)pick(&state, (uint64_t)g.ranks);
    g.quit_step = (int)pick(&state, (uint64_t)g.steps);
    g.nccl = draw(&g, NCCL, 0, 0, 0, 0) % 3 == 0;
    state = draw(&g, RATES, 0, 0, 0, 0);
    g.again = rate(&state), g.odd = rate(&state);
    g.weighted = draw(&g, WEIGHT, 0, 0, 0, -1) % 2 == 0;
    g.joins = !g.again && draw(&g, WEIGHT, 0, 0, 0, -3) % 2 == 0; /* which makes nothing again */
    g.adamw = draw(&g, WEIGHT, 0, 0, 0, -2) % 2 == 0;
    if (!g.desc.missing_gradient && draw(&g, MISSING, 0, 0, 0, 0) % 3 == 0)
        g.desc.missing_gradient = DTRAIN_MISSING_GRADIENT_ZERO;
    if (OVER_MPI)
        g.mode = DTRAIN_LAUNCH_PROCESSES, g.quitter = -1; /* MPI is not called after a failure */
    return g;
}

static void print_program(const program *g)
{
    static const char *const kinds[] = {"",           "ddp",   "zero1",       "shard_grad_op",
                                        "full_shard", "zero3", "hybrid_shard"};
    const dtrain_strategy_desc *d = &g->desc;
    printf("  seed %llu%s: %d ranks (%s%s), %s, %d steps of %d micro-batches, accumulation %u, "
           "node_size %u%s, "
           "missing %u, reduce %s, param %s, buckets %zu%s, no_overlap %02x, "
           "compression %u (dense %llu), quits %d in %d%s%s%s\n"
           "  one in: lacks %llu, unit %llu, all %llu; late %llu, looks %llu, order %llu, repeats "
           "%llu, again %llu, odd %llu\n",
           (unsigned long long)g->seed, g->note, g->ranks, ranks_mode_name(g->mode),
           g->nccl ? ", NCCL on GPUs" : "", kinds[d->kind], g->steps, g->micro, d->accumulation,
           d->node_size, d->hierarchical ? ", hierarchical" : "", d->missing_gradient,
           dtrain_dtype_name((dtrain_dtype)d->reduce_dtype),
           dtrain_dtype_name((dtrain_dtype)d->param_dtype), d->bucket_bytes,
           d->keep_after_forward ? ", kept" : "", g->no_overlap, g->compression.kind,
           (unsigned long long)g->compression.dense_steps, g->quitter, g->quit_step,
           g->weighted ? ", weighted" : "", g->joins ? ", joins" : "", g->adamw ? ", AdamW" : "",
           (unsigned long long)g->lacks, (unsigned long long)g->lacks_unit,
           (unsigned long long)g->lacks_all, (unsigned long long)g->stragglers,
           (unsigned long long)g->looks, (unsigned long long)g->own_order,
           (unsigned long long)g->repeats, (unsigned long long)g->again,
           (unsigned long long)g->odd);
    for (int p = 0; p < g->params; p++) {
        printf("  p%d: unit %u, %lld%s%s", p, g->p[p].unit, (long long)g->p[p].count,
               g->p[p].flags ? ", frozen" : "", g->p[p].host_value ? ", host's value" : "");
        if (g->p[p].storage != p) printf(", alias of p%d", g->p[p].storage);
        if (g->p[p].host_grads) printf(", host's gradient %02x", g->p[p].host_grads);
        printf("\n");
    }
}

/* ---- Running --------------------------------------------------------------------------------------*/

/* Places storages in the oracle's arrays, which shrinking may have changed. */
static void place(program *g)
{
    g->elements = 0;
    g->units = (int)g->p[g->params - 1].unit + 1;
    for (int p = 0; p < g->params; p++) {
        g->p[p].first = g->elements;
        if (g->p[p].storage == p) g->elements += g->p[p].count;
        else g->p[p].first = g->p[g->p[p].storage].first;
    }
}

static void say_nothing(void *user, dtrain_log_level level, int rank, const char *line)
{
    (void)user, (void)level, (void)rank, (void)line;
}

#ifdef DTRAIN_CUDA_EMULATION
static play *playing; /* in the process that launches, and in its ranks */

/* NCCL of this process takes its time. */
static void slow_down(const program *g, int rank)
{
    nccl_mock.delay_steps = (int)(draw(g, DELAY, rank, 0, 0, 0) % 5);
    nccl_mock.progress_polls = (int)(draw(g, POLLS, rank, 0, 0, 0) % 3);
}

static dtrain_result checked_create(const dtrain_device_desc *desc, dtrain_device *device)
{
    if (playing->g->mode == DTRAIN_LAUNCH_PROCESSES) slow_down(playing->g, (int)desc->device_index);
    return dtrain_cuda_device_ops()->create(desc, device);
}

static void checked_destroy(dtrain_device *device)
{
    const bool single = playing->g->mode == DTRAIN_LAUNCH_PROCESSES;
    const nccl_mock_counts *now = &nccl_mock_count;
    const int held = now->comms + now->allocations + now->registrations;
    dtrain_cuda_device_ops()->destroy(device);
    __atomic_add_fetch(&playing->r->misuses, now->misuses + (single ? held : 0), __ATOMIC_RELAXED);
}

/* A device for each rank, and NCCL between them. */
static void use_nccl(play *y, dtrain_launch_desc *desc, dtrain_device_ops *ops)
{
    playing = y;
    dtrain_emulation_set_device_count(MOST_RANKS);
    slow_down(y->g, 0);
    *ops = *dtrain_cuda_device_ops();
    ops->create = checked_create;
    ops->destroy = checked_destroy;
    desc->device_ops = ops;
    desc->comm_ops = dtrain_nccl_comm_ops();
}
#endif

static dtrain_result launch_program(play *y)
{
    dtrain_launch_desc desc = ranks_desc(y->g->ranks, y->g->mode);
    desc.timeout_ms = 8000;
    desc.options.log = say_nothing;
#ifdef DTRAIN_USE_CUDA
    desc.device_ops =
        dtrain_cuda_device_ops(); /* staged: its memory reaches other ranks through the host's */
#endif
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_device_ops ops;
    if (y->g->nccl) use_nccl(y, &desc, &ops);
#endif
#ifdef DTRAIN_USE_MPI
    (void)dtrain_comm_ops_by_name("mpi", &desc.comm_ops);
#endif
    alarm(40);
    return dtrain_launch(&desc, rank_main, y, NULL);
}

/* True if the program ends as it must; otherwise *text says what one of its ranks found. */
static bool passes(program *g, char *text, size_t room)
{
    place(g);
    const size_t bytes =
        sizeof(report) + (size_t)(g->steps + 1) * (size_t)g->elements * sizeof(double) + 64;
    play y = {g, (report *)ranks_shared(bytes)};
    const bool low = g->desc.reduce_dtype > DTRAIN_DTYPE_F32,
               low_values = g->desc.param_dtype > DTRAIN_DTYPE_F32;
    y.r->tolerance = low ? 0.04 : 1e-5;
    y.r->gathered_tolerance = low_values ? 0.04 : y.r->tolerance;
    oracle(&y);
    fflush(stdout);
    if (OVER_MPI) {
        const bool good = launch_program(&y) == DTRAIN_OK;
        snprintf(text, room, "%s", good ? "" : dtrain_last_error());
        for (int r = 0; r < g->ranks && !good; r++)
            if (y.r->outcome[r] == 2) snprintf(text, room, "rank %d: %s", r, y.r->text[r]);
        munmap(y.r, bytes);
        return good;
    }
    const pid_t child = fork();
    if (child == 0) {
        setpgid(0, 0);
        _exit(launch_program(&y) == DTRAIN_OK ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    kill(-child, SIGKILL);
    const bool quits = g->quitter >= 0 && g->quitter < g->ranks && g->quit_step < g->steps;
    bool good = !quits ? status == 0 : WIFEXITED(status) && WEXITSTATUS(status) == 1;
    snprintf(text, room, "the launcher ended with status %x, NCCL was misused %d times",
             (unsigned)status, y.r->misuses);
    good = good && !y.r->misuses;
    for (int r = g->ranks - 1; r >= 0; r--) {
        const bool peer = y.r->outcome[r] == 2 && strstr(y.r->text[r], "DTRAIN_ERROR_PEER");
        good = good && (y.r->outcome[r] == 1 || (peer && quits));
        if (y.r->outcome[r] == 2 && !peer) snprintf(text, room, "rank %d: %s", r, y.r->text[r]);
    }
    munmap(y.r, bytes);
    return good;
}

/* Takes away what the failure does not need: a change that still fails is kept. */
static void shrink(program *g)
{
    enum { FIRST_PARAM = 28 }; /* changes of parameters come after all others */
    char text[500];
    bool smaller = true;
    while (smaller) {
        smaller = false;
        for (int change = 0; change < FIRST_PARAM + MOST_PARAMS; change++) {
            program next = *g;
            const int own = change - FIRST_PARAM;
            switch (change) {
            case 0: next.steps = 1; break;
            case 1: next.micro = next.micro > 1 ? next.micro - 1 : 1; break;
            case 2: next.params = next.params > 1 ? next.params - 1 : 1; break;
            case 3: next.mode = DTRAIN_LAUNCH_THREADS; break;
            case 4: next.stragglers = 0; break;
            case 5: next.looks = 0; break;
            case 6: next.repeats = 0; break;
            case 7: next.own_order = 0; break;
            case 8: next.lacks_all = 0; break;
            case 9: next.lacks_unit = 0; break;
            case 10: next.lacks = 0; break;
            case 11: next.desc.reduce_dtype = 0; break;
            case 12: next.desc.param_dtype = 0; break;
            case 14: next.desc.bucket_bytes = 0; break;
            case 15: next.desc.keep_after_forward = false; break;
            case 16: next.joins = false; break;
            case 17: next.desc.hierarchical = false, next.desc.node_size = 0; break;
            case 18: next.compression.kind = 0; break;
            case 19: next.no_overlap = 0; break;
            case 20: next.desc.missing_gradient = 0; break;
            case 21: next.desc.accumulation = 0; break;
            case 22: next.ranks = next.ranks > 2 ? next.ranks - 1 : next.ranks; break;
            case 23: next.steps = next.steps > 1 ? next.steps - 1 : 1; break;
            case 24: next.nccl = false; break;
            case 25: next.again = 0; break;
            case 26: next.odd = 0; break;
            case 27: next.weighted = false; break;
            case 13: next.adamw = false; break;
            default:
                next.p[own].host_grads = 0, next.p[own].host_value = false;
                if (next.p[own].count > 1 && next.p[own].storage == own) {
                    next.p[own].count = 1;
                    for (int p = 0; p < next.params; p++)
                        if (next.p[p].storage == own) next.p[p].count = 1;
                }
            }
            if (change == 17 && g->desc.kind == DTRAIN_STRATEGY_HYBRID_SHARD) continue;
            if (change == 22 && next.desc.node_size && (uint32_t)next.ranks % next.desc.node_size)
                continue;
            if (memcmp(&next, g, sizeof next) == 0) continue;
            if (passes(&next, text, sizeof text)) continue;
            *g = next;
            snprintf(g->note, sizeof g->note, ", smaller");
            smaller = true;
        }
    }
}

static const uint64_t failed_once[] = {
    1,         /* a gradient that one rank lacks in one micro-batch */
    334322844, /* the same, with an alias */
    334322845, /* a unit without gradients on one rank: reduce-scatter met all-gather */
    334322847, /* whole gradients beside sharded ones, reduced in every micro-batch */
    334322850, /* the memory of gradients is the host's on one rank */
    334322866, /* a rank that steps over units */
    334322878, /* late in a run of three steps */
    987324227, /* a bucket of no unit, launched in the middle of a backward */
    618034015, /* activations made again by a rank that has stepped over units */
    618033999, /* accumulate between a unit's gather and its first mark */
    20272881,  /* AdamW with gradients that cancel, rounded to bf16 */
};

static bool run_seed(uint64_t seed, bool words)
{
    program g = generate(seed);
    char text[500];
    if (words) print_program(&g);
    if (passes(&g, text, sizeof text)) return true;
    fprintf(OVER_MPI ? stderr : stdout, "  FAIL seed %llu: %s\n", (unsigned long long)seed, text);
    if (OVER_MPI) exit(1);
    shrink(&g);
    passes(&g, text, sizeof text);
    print_program(&g);
    printf("  %s\n  again: build/tests/test_programs --seed %llu\n", text,
           (unsigned long long)seed);
    return false;
}

int main(int argc, char **argv)
{
    seeds s = seeds_of(argc, argv, MANY, 20);
    setvbuf(stdout, NULL, _IOLBF, 0);
#ifdef DTRAIN_USE_MPI
    int rank;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SINGLE, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &mpi_ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Bcast(&s.first, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
    if (rank && !freopen("/dev/null", "w", stdout)) return 1;
#endif
    const int status =
        seeds_run(&s, failed_once, sizeof failed_once / sizeof *failed_once, run_seed);
#ifdef DTRAIN_USE_MPI
    MPI_Finalize();
#endif
    return status;
}
