/* forecast.h: --dry-run: what a run would be, without it: its flags, its memory, its step time, its scaling.
 *
 * The program's own loss, the library's trainer, strategy and optimizer run, as one rank of N, on the simulator's
 * device, which has no memory and only moves a clock, and with its communicator, which has no peers
 * (tools/simulate/simulate_device.h, simulate_comm.h). So what is gathered, reduced, overlapped and kept is not
 * modelled but done. What is modelled: the seconds of a kernel and of a collective, from rates that machine.h measures
 * here, or that a cluster of the simulator has (--cluster).
 *
 * All that is printed beside the flags is a comment: the output is a file for --config. */
#ifndef PLAN_FORECAST_H
#define PLAN_FORECAST_H

#include "tools/plan/stages.h"
#include "tools/simulate/simulate_comm.h"
#include "tools/process_memory.h"

typedef struct forecast_row {
    int ranks, nodes;
    uint32_t batch, accum;
    double step_ms, products_ms, others_ms, update_ms, comm_ms, exposed_ms, rate;
    uint64_t sent, between;
    int64_t sample_things;
    dtrain_memory memory;
    uint64_t snapshot_bytes;
    dtrain_strategy_info strategy;
} forecast_row;

/* What a forecast is made of; one, because the virtual clock is one as well. */
typedef struct forecast {
    const run_settings *s;
    const run_program *program;
    const cluster *named; /* --cluster; NULL: this machine */
    cluster machine;
    machine_rates rates;
    dtrain_launch_place place;
    int ranks, node_ranks, cores;
    uint32_t threads;
    int depth;          /* ranks of a pipeline; what is forecast for one is divided among them */
    bool together;      /* all ranks are on this machine, whatever counts as a node */
    uint64_t workspace; /* of a process that has done nothing yet */
    forecast_row met;   /* what meet_model found */
} forecast;

/* ---- one number of ranks ---------------------------------------------------------------------------- */

/* The ranks, of so many, that share a machine. */
static int ranks_here(const forecast *f, int ranks)
{
    return f->together || ranks < f->node_ranks ? ranks : f->node_ranks;
}

/* Set the clock to zero on a machine which this number of ranks may have to share. */
static void start_clock(const forecast *f, int ranks)
{
    const double crowd = (double)ranks_here(f, ranks) * f->depth * f->threads / f->cores;
    memset(&sim, 0, sizeof sim);
    sim.machine = f->machine;
    sim.rate_scale = 1;
    if (!f->named && crowd > 1) sim.machine.efficiency /= crowd;
    if (!f->named && crowd > 1) sim.machine.hbm_gbs /= crowd;
    sim_layers.products = sim_layers.others = sim_layers.flops = 0;
    sim_layers.call_seconds = f->rates.call_seconds;
}

/* Time the second step: it begins as every later one does. */
static dtrain_result time_step(run_job *j, forecast_row *r)
{
    dtrain_result result = DTRAIN_OK;
    dtrain_step_record record;
    TRY(dtrain_trainer_step(j->trainer, NULL));
    const struct simulation before = sim;
    const struct sim_layers layers = sim_layers;
    TRY(dtrain_trainer_step(j->trainer, &record));
    r->step_ms = 1e3 * (sim.now - before.now);
    r->products_ms = 1e3 * (sim_layers.products - layers.products);
    r->others_ms = 1e3 * (sim_layers.others - layers.others);
    r->update_ms = 1e3 * (sim.computed - before.computed) - r->products_ms - r->others_ms;
    r->comm_ms = 1e3 * (sim.communicated - before.communicated);
    r->exposed_ms = 1e3 * (sim.exposed - before.exposed);
    r->sent = (uint64_t)(dtrain_record_value(&record, "comm_bytes") -
                         fmax(0, dtrain_record_value(&record, "tensor_bytes")));
    /* without what the trainer exchanges about the step, which goes to all ranks alike */
    const double away =
        r->ranks > 1 ? (double)(r->ranks - r->ranks / r->nodes) / (r->ranks - 1) : 0;
    r->between = sim.between - before.between -
                 (uint64_t)((double)(sim.sent - before.sent - r->sent) * away);
    r->rate =
        1e3 *
        (double)(r->ranks / model_ranks(j->s) * (int64_t)r->batch * r->accum * j->sample_things) /
        (r->step_ms > 0 ? r->step_ms : 1);
cleanup:
    return result;
}

/* Count what the rank that needs most has; the one that ran may own less. */
static dtrain_result plan_most(const run_job *j, const dtrain_strategy_desc *desc,
                               uint64_t workspace, forecast_row *r)
{
    dtrain_param *params = copy_params(j);
    dtrain_memory planned, *m = &r->memory;
    if (!params) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a plan");
    const dtrain_result result =
        dtrain_strategy_plan(params, j->param_count, desc, r->ranks, &planned);
    free(params);
    if (result != DTRAIN_OK) return result;
    *m = j->memory;
    if (planned.total > m->params + m->grads + m->optimizer + m->buffers) {
        m->params = planned.params, m->grads = planned.grads;
        m->optimizer = planned.optimizer, m->buffers = planned.buffers;
    }
    m->workspace = workspace;
    r->snapshot_bytes = j->snapshot_bytes;
    m->total = m->params + m->grads + m->optimizer + m->buffers + m->activations +
               m->activation_grads + m->workspace + r->snapshot_bytes;
    return DTRAIN_OK;
}

/* Leave a batch as it is: a forecast has no data. */
static dtrain_result no_batch(void *own)
{
    (void)own;
    return DTRAIN_OK;
}

/* Fill the rest of *r, whose number of ranks is given. */
static dtrain_result forecast_ranks(dtrain_world *world, const forecast *f, forecast_row *r)
{
    dtrain_device *device = dtrain_world_device(world);
    void *const first_address = device->state; /* all is given back: the next may have it */
    dtrain_compression_desc compression;
    dtrain_strategy_desc desc = strategy_desc(f->s, &compression);
    run_settings settings = *f->s;
    run_program program = *f->program;
    run_job j = new_job(&settings, &program, calloc(1, program.own_bytes));
    dtrain_result result = DTRAIN_OK;
    if (!j.own) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a job");
    settings.graph = 0; /* nothing is recorded */
    program.next_batch = no_batch;
    start_clock(f, r->ranks);
    r->nodes = (r->ranks + f->node_ranks - 1) / f->node_ranks;
    /* not the first one along either axis: see null_split_mesh */
    const int t = (int)f->s->tensor, rank = t > 1 && r->ranks > t ? t + 1 : sim_rank(r->ranks);
    TRY(sim_comm_new(world, r->ranks, r->nodes, rank, &j.comm));
    desc.memory_limit =
        f->s->memory_limit
            ? (uint64_t)f->s->memory_limit << 20
            : (uint64_t)(f->machine.memory_gib * 1073741824.0 / (f->named ? 1 : f->ranks));
    if (!desc.node_size && (desc.kind == DTRAIN_STRATEGY_HYBRID_SHARD || desc.hierarchical))
        desc.node_size = (uint32_t)(r->ranks / r->nodes / t);
    ((null_comm *)(void *)j.comm)->tensor = t > 1 ? t : 0; /* open_mesh splits it */
    TRY(open_mesh(world, r->ranks, &j));
    TRY(plan_job(world, &j, &desc));
    for (size_t i = 0; i < j.param_count; i++) /* nobody will see the values */
        j.params[i].init = DTRAIN_INIT_ZERO;
    TRY(open_trainer(world, &j, &desc));
    r->batch = j.batch;
    r->accum = j.accum;
    r->sample_things = j.sample_things;
    dtrain_strategy_query(j.strategy, &r->strategy);
    TRY(time_step(&j, r));
    desc.kind = r->strategy.desc.kind; /* AUTO has chosen */
    desc.comm = NULL;
    if (f->workspace && !f->named)
        TRY(plan_snapshot(world, r->ranks, &j)); /* the device has no memory */
    TRY(plan_most(&j, &desc, f->workspace, r));
cleanup:
    dtrain_trainer_destroy(j.trainer);
    dtrain_optimizer_destroy(j.optimizer);
    dtrain_strategy_destroy(j.strategy);
    f->program->close(&j);
    dtrain_mesh_destroy(j.mesh);
    dtrain_comm_destroy(j.comm);
    free(j.own);
    device->state = first_address;
    return result;
}

/* ---- what is printed ----------------------------------------------------------------------------------- */

static void print_memory(const forecast *f, const forecast_row *r)
{
    const dtrain_memory *m = &r->memory;
    const double have = f->machine.memory_gib * 1024, limit = (double)f->s->memory_limit;
    const int here = ranks_here(f, r->ranks);
    const double need = mib(m->total);
    printf(
        "# memory    a rank will need %.1f MiB: parameters %.1f, gradients %.1f, optimizer %.1f, "
        "buffers %.1f, activations %.1f + %.1f, workspace %.1f, snapshot %.1f\n",
        need, mib(m->params), mib(m->grads), mib(m->optimizer), mib(m->buffers),
        mib(m->activations), mib(m->activation_grads), mib(m->workspace), mib(r->snapshot_bytes));
    if (f->named)
        printf("#           a device of %s has %.1f GiB: %s\n", f->named->name,
               f->machine.memory_gib, need <= have ? "fits" : "would not fit");
    else
        printf("#           %d ranks here need %.1f of this machine's %.1f GiB: %s\n", here,
               need * here / 1024, have / 1024, need * here <= have ? "fits" : "would not fit");
    if (limit > 0)
        printf("#           --memory-limit is %.0f MiB a rank: %s\n", limit,
               need - mib(m->workspace + r->snapshot_bytes) <= limit ? "fits" : "would not fit");
}

static void print_step(const forecast *f, const forecast_row *r)
{
    if (f->s->tensor > 1)
        printf("# mesh      tensor %ld x data %ld%s\n", f->s->tensor, r->ranks / f->s->tensor,
               f->s->sequence_parallel ? ", sequence-parallel" : "");
    printf("# strategy  %s: %d shard%s x %d replica%s; a rank sends %llu bytes a step",
           r->strategy.name, r->strategy.shard_ranks, plural(r->strategy.shard_ranks),
           r->strategy.replicas, plural(r->strategy.replicas), (unsigned long long)r->sent);
    if (r->nodes > 1) printf(", %llu of them to other nodes", (unsigned long long)r->between);
    printf("\n");
    if (r->strategy.reason[0]) printf("#           auto: %s\n", r->strategy.reason);
    printf("# step      %.2f ms predicted: products %.2f, other kernels %.2f, optimizer and sums "
           "%.2f, "
           "exposed communication %.2f of %.2f; without waiting for data, validations and "
           "checkpoints\n",
           r->step_ms, r->products_ms, r->others_ms, r->update_ms, r->exposed_ms, r->comm_ms);
    printf("# run       %.0f %s\n", r->rate, f->program->sample_name);
}

static void print_rates(const forecast *f)
{
    const machine_rates *m = &f->rates;
    const cluster *c = &f->machine;
    if (f->named) {
        printf("# assumed   all rates, of %s: %s; %g TFLOPS x %g, %g GB/s of memory, links %g GB/s "
               "in a node of %ld, %g Gb/s a node, %g us\n",
               c->name, c->what, c->tflops_bf16, c->efficiency, c->hbm_gbs, c->nvlink_gbs,
               c->gpus_per_node, c->network_gbps, c->latency_us);
        return;
    }
    printf("# measured  %.1f GFLOP/s of a rank (%s; %u thread%s), %.1f GB/s of memory, %.1f us a "
           "call",
           1e-9 * m->flops, m->product, f->threads, f->threads == 1 ? "" : "s", 1e-9 * m->bytes,
           1e6 * m->call_seconds);
    if (m->link_bytes > 0) printf(", %.1f GB/s between two ranks here", 1e-9 * m->link_bytes);
    printf("\n# %s    nodes of %d ranks, %g Gb/s and %g us between them%s\n",
           f->s->emulate ? "given  " : "assumed", f->node_ranks, c->network_gbps, c->latency_us,
           f->s->emulate ? " (--emulate)" : "; more nodes are machines like this one");
    const int here = ranks_here(f, f->ranks);
    if (here * (int)f->threads > f->cores)
        printf("#           %d cores are shared by %d ranks of %u threads\n", f->cores, here,
               f->threads);
}

static void print_row(const forecast *f, const forecast_row *r, const forecast_row *first)
{
    printf("# %7d %6d %6u %6u %10.2f %12.0f %7.1f %10.2f %10.2f %10.1f%s\n", r->ranks, r->nodes,
           r->batch, r->accum, r->step_ms, r->rate,
           100 * r->rate / r->ranks / (first->rate / first->ranks), r->exposed_ms, r->comm_ms,
           mib(r->memory.total), r->ranks == f->ranks ? "  <- this run" : "");
}

/* ---- the whole of it ------------------------------------------------------------------------------------- */

enum { MOST_NODES = 8 };

/* Print a row for 1, 2, 4 ... ranks of a node, and for 1, 2, 4 ... nodes. */
static void print_scaling(dtrain_world *world, const forecast *f, const forecast_row *own)
{
    forecast_row first, r;
    const int last = f->ranks > f->node_ranks * MOST_NODES ? f->ranks : f->node_ranks * MOST_NODES;
    memset(&first, 0, sizeof first);
    printf("#\n# %7s %6s %6s %6s %10s %12s %7s %10s %10s %10s\n", "ranks", "nodes", "batch",
           "accum", "step ms", f->program->sample_name, "eff %", "exposed ms", "comm ms",
           "MiB a rank");
    for (int ranks = 1; ranks <= last;) {
        memset(&r, 0, sizeof r);
        r.ranks = ranks;
        if (ranks % (int)f->s->tensor) r.ranks = 0; /* no mesh has so many */
        else if (ranks == own->ranks) r = *own;
        else if (forecast_ranks(world, f, &r) != DTRAIN_OK) {
            printf("# %7d  no forecast: %s\n", ranks, run_error());
            r.ranks = 0;
        }
        if (r.ranks && !first.ranks) first = r;
        if (r.ranks) print_row(f, &r, &first);
        const int next =
            ranks < f->node_ranks && 2 * ranks > f->node_ranks ? f->node_ranks : 2 * ranks;
        ranks = ranks < f->ranks && next > f->ranks ? f->ranks : next;
        if (ranks > f->node_ranks && ranks % f->node_ranks)
            ranks += f->node_ranks - ranks % f->node_ranks;
    }
}

/* Meet the model: find its largest products, and whether the run can be. */
static int meet_model(dtrain_world *world, void *user)
{
    forecast *f = (forecast *)user;
    memset(&f->met, 0, sizeof f->met);
    f->met.ranks = f->ranks;
    return forecast_ranks(world, f, &f->met) == DTRAIN_OK ? 0 : 1;
}

/* Print the flags as they are in force. */
static void print_flags(const forecast *f, const forecast_row *own, char about[128])
{
    const bool replicas = f->s->tensor > 1 || f->depth > 1;
    snprintf(about, 128, "%d %s, %u samples a rank and micro-batch, %u of these a step",
             own->ranks / (int)f->s->tensor, replicas ? "replicas" : "ranks", own->batch,
             own->accum);
    printf("# " RUN_NAME " of dtrain %s: %s\n", DTRAIN_VERSION_STRING, about);
    config_write(stdout, flag_table, flag_count);
    printf("\n");
}

static int print_forecast(dtrain_world *world, void *user)
{
    forecast *f = (forecast *)user;
    forecast_row own;
    char about[128];
    memset(&own, 0, sizeof own);
    own.ranks = f->ranks;
    if (forecast_ranks(world, f, &own) != DTRAIN_OK) return 1;
    print_flags(f, &own, about);
    print_memory(f, &own);
    print_step(f, &own);
    print_rates(f);
    print_scaling(world, f, &own);
    if (!f->s->config_out) return 0;
    return write_config(f->s->config_out, about) == DTRAIN_OK ? 0 : 1;
}

/* Run a function as the only rank of a virtual world, with a device that may be the simulator's, whatever launched
 * this process. */
static dtrain_result launch_virtual(const dtrain_device_ops *device, dtrain_rank_fn rank,
                                    void *user)
{
    dtrain_launch_desc launch;
    static const struct {
        const char *name, *value;
    } alone[] = {{"DTRAIN_RANK", "0"},
                 {"DTRAIN_WORLD_SIZE", "1"},
                 {"DTRAIN_LOCAL_RANK", "0"},
                 {"DTRAIN_LOCAL_SIZE", "1"}};
    enum { VARIABLES = sizeof alone / sizeof alone[0] };
    char *before[VARIABLES];
    memset(&launch, 0, sizeof launch);
    launch.rank_count = 1;
    launch.mode = DTRAIN_LAUNCH_THREADS;
    launch.device_ops = device;
    launch.comm_ops = sim_comm_ops();
    for (int i = 0; i < VARIABLES; i++) {
        const char *value = getenv(alone[i].name);
        before[i] = value ? strdup(value) : NULL;
        setenv(alone[i].name, alone[i].value, 1);
    }
    const dtrain_result result = dtrain_launch(&launch, rank, user, NULL);
    for (int i = 0; i < VARIABLES; i++) {
        if (before[i]) setenv(alone[i].name, before[i], 1);
        else unsetenv(alone[i].name);
        free(before[i]);
    }
    return result;
}

/* Describe the machine, as far as it need not be measured: one rank's part of it. */
static int choose_machine(forecast *f)
{
    const run_settings *s = f->s;
    const bool cpu = strcmp(s->device, "cpu") == 0;
    const char *name = s->cluster ? s->cluster : cpu ? NULL : "h100";
    const double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    uint64_t peak;
    f->cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    for (int i = 0; name && i < CLUSTERS; i++)
        if (strcmp(name, clusters[i].name) == 0) f->named = &clusters[i];
    if (name && !f->named)
        return BAD("--cluster is \"%s\", which is none of build/simulate's; its --help lists them",
                   name);
    if (place_ranks(s, true, &f->place)) return 2;
    f->ranks = f->place.rank_count;
    f->together = s->emulate || s->node_size;
    f->node_ranks = s->emulation.node_ranks    ? (int)s->emulation.node_ranks
                    : s->node_size             ? (int)s->node_size
                    : f->place.host_rank_count ? f->place.host_rank_count
                                               : f->ranks;
    if (cpu) process_memory(&f->workspace, &peak);
    if (f->named) {
        f->machine = *f->named;
        f->node_ranks = s->node_size ? (int)s->node_size : (int)f->machine.gpus_per_node;
        f->machine.gpus_per_node = f->node_ranks;
        f->together = false;
        if (!s->precision) f->machine.tflops_bf16 = f->machine.tflops_fp32;
        f->threads = 1;
        if (f->ranks > f->node_ranks && f->ranks % f->node_ranks)
            return BAD("--cluster %s has nodes of %d ranks, and --ranks is %d", name, f->node_ranks,
                       f->ranks);
        return 0;
    }
    const int local = ranks_here(f, f->ranks);
    f->threads =
        s->threads ? (uint32_t)s->threads : (uint32_t)(f->cores > local ? f->cores / local : 1);
    f->machine = clusters[CLUSTERS - 1]; /* custom */
    f->machine.gpus_per_node = f->node_ranks;
    f->machine.network = NETWORK_EMULATED;
    f->machine.network_gbps = s->emulate ? s->emulation.gigabits_per_second : ASSUMED_GBPS;
    f->machine.latency_us = s->emulate ? s->emulation.latency_us : ASSUMED_US;
    f->machine.memory_gib = memory / 1073741824.0;
    return 0;
}

static void use_rates(forecast *f)
{
    cluster *c = &f->machine;
    c->tflops_bf16 = 1e-12 * f->rates.flops;
    c->efficiency = 1;
    c->hbm_gbs = 1e-9 * f->rates.bytes;
    c->nvlink_gbs = f->rates.link_bytes > 0 ? 1e-9 * f->rates.link_bytes : c->hbm_gbs;
}

/* Print what the schedule makes of the compute that one rank would have. */
static void print_pipeline(const forecast *f, const stage_plan *p)
{
    const forecast_row *one = &f->met;
    const double computes = one->products_ms + one->others_ms, scale = computes / p->total;
    const double update = one->update_ms / f->depth, step = scale * p->makespan + update;
    printf("# mesh      tensor %ld x pipeline %d x data %d%s\n", f->s->tensor, f->depth,
           one->ranks / (int)f->s->tensor, f->s->sequence_parallel ? ", sequence-parallel" : "");
    printf("# step      %.2f ms predicted: products and other kernels %.2f a rank, bubble %.2f = "
           "%.1f %% of the schedule, optimizer and sums %.2f; without messages between stages, "
           "reductions, waiting for data, validations and checkpoints\n",
           step, computes / f->depth, scale * p->makespan - computes / f->depth, 100 * p->bubble,
           update);
    printf("# run       %.0f %s\n", one->rate * one->step_ms / step, f->program->sample_name);
}

/* Forecast one rank in place of each pipeline, then divide what it computes. */
static int dry_run_pipeline(forecast *f)
{
    static run_settings flat;
    static stage_plan p;
    const run_settings *s = f->s;
    const dtrain_device_ops *device = sim_layer_ops();
    char about[128];
    p.s = s;
    p.program = f->program;
    p.ranks = f->ranks;
    p.stages = stage_count(s);
    p.workspace = f->workspace;
    flat = *s;
    flat.pipeline = 1;
    f->s = &flat;
    f->depth = (int)s->pipeline;
    f->ranks /= f->depth;
    dtrain_result result = launch_virtual(device, meet_model, f);
    if (result == DTRAIN_OK && !f->named) result = measure_machine(s, f->threads, &f->rates);
    if (result == DTRAIN_OK && !f->named) use_rates(f);
    if (result == DTRAIN_OK) result = launch_virtual(device, meet_model, f);
    p.batch = f->met.batch;
    p.accum = f->met.accum;
    p.j = new_job(s, f->program, calloc(1, f->program->own_bytes));
    if (!p.j.own) result = dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a job");
    if (result == DTRAIN_OK && !f->named) result = dtrain_device_ops_by_name(s->device, &device);
    if (result == DTRAIN_OK) result = launch_virtual(device, count_units, &p);
    if (result == DTRAIN_OK) {
        print_flags(f, &f->met, about);
        result = print_stages(&p);
    }
    if (result == DTRAIN_OK) print_pipeline(f, &p);
    if (result == DTRAIN_OK) print_rates(f);
    if (result == DTRAIN_OK && s->config_out) result = write_config(s->config_out, about);
    const int status = result == DTRAIN_OK ? 0 : BAD("--dry-run: %s", run_error());
    free_stages(&p);
    return status;
}

/* Print the forecast of a run and stop. Return main's exit status. */
static int dry_run(const run_settings *s, const run_program *program)
{
    static forecast f;
    f.s = s;
    f.program = program;
    f.depth = 1;
    if (s->offload)
        return BAD("--dry-run and --offload: a forecast has no host memory to offload to");
    if (choose_machine(&f)) return 2;
    if (f.place.started_count < f.ranks)
        return BAD("--dry-run: another launcher has started this process as rank %d of %d, and a "
                   "forecast is made by one: run it without the launcher, with --ranks %d",
                   f.place.first_rank, f.ranks, f.ranks);
    if (s->pipeline > 1) return dry_run_pipeline(&f);
    dtrain_result result = launch_virtual(sim_layer_ops(), meet_model, &f);
    if (result == DTRAIN_OK && !f.named) result = measure_machine(s, f.threads, &f.rates);
    if (result == DTRAIN_OK && !f.named) use_rates(&f);
    if (result == DTRAIN_OK) result = launch_virtual(sim_layer_ops(), print_forecast, &f);
    return result == DTRAIN_OK ? 0 : BAD("--dry-run: %s", run_error());
}

#endif /* PLAN_FORECAST_H */
