/* simulate_plan.h: --plan, the search for the fastest layout that fits. Part of simulate.c: included behind its tables.
 *
 *     axes         tensor up to a node's GPUs, pipeline any divisor of the rest; powers of two samples a micro-batch
 *     kinds        one stage: ddp, zero1, full_shard, hybrid_shard; a pipeline: ddp and zero1, in 1F1B, interleaved (2
 *                  and 4 chunks) and ZB-H1. GPipe takes the time of 1F1B and more memory: it is left out
 *     memory       with and without checkpointing, and sequence parallelism where there is a tensor axis
 *
 * Layouts are simulated in the order of a bound of their time: what the model computes, on all GPUs alike, nothing
 * exposed, and the bubble of their schedule. What cannot be among the PLAN_ROWS best any more is not simulated, and
 * neither is
 * what cannot fit by a bound of its memory. */
#ifndef SIMULATE_PLAN_H
#define SIMULATE_PLAN_H

enum { PLAN_ROWS = 10 };

/* The first stage has at least this share of the blocks that it would have if stages had equally many. */
#define PLAN_EVEN 0.5

typedef struct layout {
    long tensor, pipeline, schedule, chunks, batch, strategy, checkpointing, rows_cut;
    double bound; /* ms, at least */
    size_t number;
    row is;
} layout;

typedef struct plan {
    layout *layouts;
    size_t count, room;
    size_t refused; /* that have more stages than the model has units */
    long units;
    double flops; /* of a step of the whole model */
    double parameters;
    double kept[2]; /* bytes of a sample's activations, without and with checkpointing, of blocks */
    double compute_ms[2]; /* of a step on one GPU, without and with checkpointing */
} plan;

/* Bubble over ideal time that a schedule has at least, for stages alike (src/parallel/pipeline.h). */
static double plan_bubble(const layout *one, long micros)
{
    const double gaps = (double)(one->pipeline - 1) / (double)micros;
    if (one->schedule == DTRAIN_PIPELINE_INTERLEAVED) return gaps / (double)one->chunks;
    if (one->schedule == DTRAIN_PIPELINE_ZB_H1) return gaps / 3;
    return gaps;
}

static bool plan_add(plan *p, layout one, long micros)
{
    if (one.pipeline * (one.chunks ? one.chunks : 1) > p->units) {
        p->refused++;
        return true;
    }
    if (p->count == p->room) {
        const size_t room = p->room ? 2 * p->room : 256;
        layout *more = (layout *)realloc(p->layouts, room * sizeof *more);
        if (!more) return false;
        p->layouts = more;
        p->room = room;
    }
    one.bound = p->compute_ms[one.checkpointing] / (double)flags.gpus.items[0];
    one.number = p->count;
    one.bound *= 1 + plan_bubble(&one, micros);
    one.is.gpus = flags.gpus.items[0];
    one.is.strategy = one.strategy;
    one.is.batch = one.batch;
    one.is.accum = micros;
    p->layouts[p->count++] = one;
    return true;
}

/* All strategies, schedules and ways to save memory of some axes and micro-batch. */
static bool plan_add_all(plan *p, layout one, long micros)
{
    static const long orders[][2] = {{DTRAIN_PIPELINE_1F1B, 0},
                                     {DTRAIN_PIPELINE_INTERLEAVED, 2},
                                     {DTRAIN_PIPELINE_INTERLEAVED, 4},
                                     {DTRAIN_PIPELINE_ZB_H1, 0}};
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_ZERO1,
                                     DTRAIN_STRATEGY_FULL_SHARD, DTRAIN_STRATEGY_HYBRID_SHARD};
    const long nodes = flags.gpus.items[0] / sim.machine.gpus_per_node;
    const int kind_count = one.pipeline > 1 ? 2 : nodes > 1 ? 4 : 3;
    const int order_count = one.pipeline > 1 ? 4 : 1;
    for (int o = 0; o < order_count; o++)
        for (int k = 0; k < kind_count; k++)
            for (int way = 0; way < (one.tensor > 1 ? 4 : 2); way++) {
                one.schedule = orders[o][0];
                one.chunks = orders[o][1];
                one.strategy = (long)kinds[k] - 1;
                one.checkpointing = way & 1;
                one.rows_cut = way >> 1;
                if (!plan_add(p, one, micros)) return false;
            }
    return true;
}

static bool plan_make(plan *p)
{
    const long gpus = flags.gpus.items[0];
    const long node = gpus < sim.machine.gpus_per_node ? gpus : sim.machine.gpus_per_node;
    layout one;
    memset(&one, 0, sizeof one);
    for (one.tensor = 1; one.tensor <= node; one.tensor++)
        for (one.pipeline = 1; one.pipeline <= gpus / one.tensor; one.pipeline++) {
            if (node % one.tensor || gpus % (one.tensor * one.pipeline)) continue;
            const long replicas = gpus / one.tensor / one.pipeline;
            if (flags.global_batch % replicas) continue;
            const long own = flags.global_batch / replicas;
            for (one.batch = 1; one.batch <= MOST_BATCH && own % one.batch == 0; one.batch *= 2)
                if (!plan_add_all(p, one, own / one.batch)) return false;
        }
    return true;
}

static void plan_use(const layout *one)
{
    flags.tensor = one->tensor;
    flags.pipeline = one->pipeline;
    flags.pipeline_schedule = one->schedule;
    flags.chunks = one->chunks;
    flags.checkpointing = one->checkpointing;
    flags.sequence_parallel = one->rows_cut;
}

/* Layouts by bound, then in the order in which they were made. */
static int by_bound(const void *a, const void *b)
{
    const layout *x = (const layout *)a, *y = (const layout *)b;
    if (x->bound != y->bound) return x->bound < y->bound ? -1 : 1;
    return (x->number > y->number) - (x->number < y->number);
}

static int by_time(const void *a, const void *b)
{
    const layout *x = (const layout *)a, *y = (const layout *)b;
    if (x->is.fits != y->is.fits) return x->is.fits ? -1 : 1;
    if (x->is.step_ms != y->is.step_ms) return x->is.step_ms < y->is.step_ms ? -1 : 1;
    if (x->is.memory_gib != y->is.memory_gib) return x->is.memory_gib < y->is.memory_gib ? -1 : 1;
    return (x->number > y->number) - (x->number < y->number);
}

/* Milliseconds that the whole model computes for a step. */
static double plan_compute(const model *m)
{
    const double rate = sim.machine.tflops_bf16 * 1e12 * sim.machine.efficiency;
    const double bandwidth = KERNEL_SHARE * sim.machine.hbm_gbs * 1e9;
    double seconds = 0;
    for (size_t i = 0; i < m->count; i++) {
        const layer *l = &m->layers[i];
        const bool again =
            !l->kept && i + 1 < m->count && m->params[i + 1].unit == m->params[i].unit;
        for (int pass = again ? -1 : 0; pass < 2; pass++) /* -1: forward once more */
            seconds += (pass > 0 ? 2 : 1) * l->flops / rate + l->around[pass > 0] / bandwidth +
                       l->attention[pass > 0] / rate / (flags.attention ? 1 : FUSED_RATE);
    }
    return 1e3 * seconds * (double)flags.global_batch;
}

/* GiB at least: parameters, gradients and moments of a stage of average size, and activations. */
static double plan_states(const plan *p, const layout *one)
{
    const double gpus = (double)one->is.gpus, states = flags.optimizer ? 1 : 2;
    const double share = p->parameters / (double)(one->tensor * one->pipeline);
    const double node = (double)sim.machine.gpus_per_node;
    const uint32_t kind = (uint32_t)one->strategy + 1;
    double elements = (2 + states) * p->parameters / gpus; /* full_shard */
    if (kind == DTRAIN_STRATEGY_DDP) elements = (2 + states) * share;
    if (kind == DTRAIN_STRATEGY_ZERO1) elements = 2 * share + states * p->parameters / gpus;
    if (kind == DTRAIN_STRATEGY_HYBRID_SHARD)
        elements = (2 + states) * p->parameters / least(gpus, node);
    /* A rank holds a pass of all its blocks at least, and in a pipeline the first one as many as it has ranks. */
    const double passes =
        least((double)one->pipeline, (double)one->is.accum) / (double)one->pipeline;
    const double kept =
        p->kept[one->checkpointing] * (double)one->batch * passes / (double)one->tensor;
    return (4 * elements + PLAN_EVEN * kept) / 1073741824.0;
}

/* The flops of a step of the whole model, forward and twice that backward. */
static int plan_flops(plan *p)
{
    model m;
    const int code = make_model(&m);
    for (size_t i = 0; i < m.count && !code; i++)
        p->flops += 3 * (m.layers[i].flops + m.layers[i].attention[0]) * (double)flags.global_batch;
    for (size_t i = 0; i < m.count && !code; i++)
        if (!m.params[i].alias_of)
            p->parameters += (double)m.params[i].shape[0] *
                             (double)(m.params[i].shape[1] ? m.params[i].shape[1] : 1);
    p->units = m.count ? (long)m.params[m.count - 1].unit + 1 : 0;
    for (int again = 0; again < 2 && !code; again++) {
        checkpoint_blocks(&m, again);
        p->compute_ms[again] = plan_compute(&m);
        model blocks = m;
        while (blocks.count && m.params[blocks.count - 1].unit > (uint32_t)m.blocks) blocks.count--;
        p->kept[again] = kept_bytes(&blocks, 1);
    }
    if (!code && !m.blocks)
        return free_model(&m), BAD("--plan: \"%s\" is no transformer", flags.model);
    free_model(&m);
    return code;
}

static void plan_print(const plan *p, const layout *one, const layout *best)
{
    const row *r = &one->is;
    const double peak = (double)r->gpus * sim.machine.tflops_bf16 * 1e9,
                 more = r->step_ms - best->is.step_ms;
    const double by[4] = {r->bubble_ms - best->is.bubble_ms, r->tensor_ms - best->is.tensor_ms,
                          r->data_ms - best->is.data_ms, 0};
    static const char *const names[4] = {"bubble", "tensor axis", "data axis", "compute"};
    double most_more = more - by[0] - by[1] - by[2];
    int why = 3;
    char order[40] = "-";
    for (int i = 0; i < 3; i++)
        if (by[i] > most_more) most_more = by[why = i];
    if (one->pipeline > 1)
        snprintf(order, sizeof order, one->chunks ? "%s/%ld" : "%s", schedules[one->schedule],
                 one->chunks);
    printf(
        "%6ld %8ld %5ld  %-15s %-12s %5ld %6ld %5s %4s %9.3f %10.0f %6.1f %8.2f %7.1f %7.1f %7.1f",
        one->tensor, one->pipeline, r->gpus / one->tensor / one->pipeline, order,
        strategies[r->strategy], r->batch, r->accum, one->checkpointing ? "yes" : "no",
        one->rows_cut ? "yes" : "no", r->step_ms / 1e3, r->rate * (double)r->gpus,
        100 * p->flops / r->step_ms / peak, r->memory_gib, 100 * r->bubble_ms / r->step_ms,
        100 * r->tensor_ms / r->step_ms, 100 * r->data_ms / r->step_ms);
    if (one == best) puts("  best");
    else
        printf("  +%.1f %%, %s +%.1f %%\n", 100 * more / best->is.step_ms, names[why],
               100 * most_more / best->is.step_ms);
}

/* Simulate what can be among the best. counts: how many fit, do not fit, are refused, are too slow by their bound. */
static int plan_search(dtrain_world *world, plan *p, size_t counts[4])
{
    double best[PLAN_ROWS];
    for (int i = 0; i < PLAN_ROWS; i++) best[i] = 1e300;
    for (size_t at = 0; at < p->count; at++) {
        layout *one = &p->layouts[at];
        model m;
        if (plan_states(p, one) > sim.machine.memory_gib) {
            counts[1]++;
            continue;
        }
        if (one->bound >= best[PLAN_ROWS - 1]) {
            one->is.fits = false;
            counts[3]++;
            continue;
        }
        plan_use(one);
        const int code = make_model(&m);
        if (code) return free_model(&m), code;
        const dtrain_result result = simulate(world, &m, &one->is);
        free_model(&m);
        if (result == DTRAIN_ERROR_MEMORY || result == DTRAIN_ERROR_INTERNAL)
            return BAD("%s", last_error());
        if (result != DTRAIN_OK) one->is.fits = false;
        counts[result != DTRAIN_OK ? 2 : one->is.fits ? 0 : 1]++;
        double time = one->is.fits ? one->is.step_ms : 1e300;
        for (int i = 0; i < PLAN_ROWS; i++)
            if (time < best[i]) {
                const double next = best[i];
                best[i] = time;
                time = next;
            }
    }
    return 0;
}

static int plan_show(const plan *p, const size_t counts[4])
{
    const layout *best = &p->layouts[0];
    const row *r = &best->is;
    const double parts[3] = {r->bubble_ms, r->tensor_ms, r->data_ms};
    printf("layouts  %zu: %zu fit, %zu do not fit in %g GiB, %zu this model or the library "
           "refuses, %zu "
           "cannot be among the best and were not simulated\n",
           p->count + p->refused, counts[0], counts[1], sim.machine.memory_gib,
           counts[2] + p->refused, counts[3]);
    if (!counts[0])
        return BAD("no layout of %s fits %ld GPUs with --global-batch %ld; try more GPUs",
                   flags.model, flags.gpus.items[0], flags.global_batch);
    printf("%6s %8s %5s  %-15s %-12s %5s %6s %5s %4s %9s %10s %6s %8s %7s %7s %7s\n", "tensor",
           "pipeline", "data", "schedule", "strategy", "batch", "micros", "ckpt", "sp", "step s",
           "tokens/s", "MFU %", "mem GiB", "bubble%", "tensor%", "data%");
    for (size_t i = 0; i < counts[0] && i < PLAN_ROWS; i++) plan_print(p, &p->layouts[i], best);
    printf("best     it idles for %.1f %% of a step, waits %.1f %% for the tensor axis and %.1f %% "
           "for the "
           "data axis and the optimizer%s;\n         behind each other layout stands what it has "
           "more of\n",
           100 * parts[0] / r->step_ms, 100 * parts[1] / r->step_ms, 100 * parts[2] / r->step_ms,
           best->checkpointing ? ", and makes its blocks again" : ", and makes no block again");
    return 0;
}

static int run_plan(dtrain_world *world)
{
    plan p;
    size_t counts[4] = {0, 0, 0, 0}; /* fit, do not, refused, too slow */
    int code = make_cluster(&sim.machine);
    memset(&p, 0, sizeof p);
    sim.rate_scale = 1;
    if (!code && (flags.gpus.count != 1 || !flags.global_batch))
        code = BAD("--plan needs one number of --gpus, and --global-batch");
    if (!code && (flags.tensor > 1 || flags.pipeline > 1 || flags.measured_rate > 0))
        code = BAD(
            "--plan chooses --tensor and --pipeline, and takes --efficiency, not --measured-rate");
    const long gpus = flags.gpus.items[0], node = sim.machine.gpus_per_node;
    if (!code && gpus > node && gpus % node)
        code = BAD("--gpus has %ld: expected at most %ld, or whole nodes of %ld", gpus, node, node);
    if (!code) code = plan_flops(&p);
    if (!code && !plan_make(&p)) code = BAD("no memory for %zu layouts", p.count);
    if (!code && !p.count)
        code = BAD("--global-batch is %ld, which no number of replicas on %ld GPUs divides",
                   flags.global_batch, gpus);
    if (!code) qsort(p.layouts, p.count, sizeof *p.layouts, by_bound);
    if (!code) code = plan_search(world, &p, counts);
    if (!code) qsort(p.layouts, p.count, sizeof *p.layouts, by_time);
    if (!code) code = plan_show(&p, counts);
    free(p.layouts);
    return code;
}

#endif
