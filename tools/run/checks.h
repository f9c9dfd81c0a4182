/* checks.h: what is refused before any rank starts, with one sentence each: switches that contradict each other or
 * would do nothing, and memory. Functions return 0, or main's exit status after the sentence. */
#ifndef RUN_CHECKS_H
#define RUN_CHECKS_H

#include "tools/run/layout.h"

/* Refuse flags of compression that would do nothing, and what compression cannot go with. What a
 * strategy cannot do, check_strategy finds. */
static int check_compression(const run_settings *s)
{
    static const char *const list[] = {
        "--topk-ratio",  "--topk-momentum", "--compression-warmup", "--warmup-ratio",
        "--dense-steps", "--dense-below",   "--no-error-feedback"};
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
        if (given(list[i]) && !s->compression)
            return BAD("%s does nothing without --compression topk", list[i]);
    if (given("--warmup-ratio") && !s->warmup_steps)
        return BAD("--warmup-ratio does nothing without --compression-warmup");
    if (s->compression && s->precision == FP16)
        return BAD("--compression and --precision fp16: what is kept for later steps has the loss "
                   "scale of its own step; use bf16");
    if (s->compression && s->graph)
        return BAD("--compression and --graph: what is sent changes in the first steps, and a "
                   "recorded step does not");
    if (s->compression && s->nonfinite == DTRAIN_NONFINITE_SKIP)
        return BAD("--compression and --nonfinite skip: what is not sent would keep a NaN; use "
                   "rollback or stop");
    if (s->compression && s->strategy != DTRAIN_STRATEGY_DDP - 1)
        return BAD("--compression works with --strategy ddp: the others reduce shards");
    return 0;
}

/* Refuse flags of another optimizer, and strategies that cut the matrices that Muon needs whole. */
static int check_optimizer(const run_settings *s)
{
    const char *const name = optimizers[s->optimizer];
    const bool muon = is_optimizer(s, DTRAIN_OPTIMIZER_MUON);
    const bool adamw = muon || is_optimizer(s, DTRAIN_OPTIMIZER_ADAMW);
    const long kind = s->strategy + 1;
    if (given("--min-lr") && s->schedule != DTRAIN_SCHEDULE_LINEAR &&
        s->schedule != DTRAIN_SCHEDULE_COSINE)
        return BAD("--min-lr does nothing with --schedule %s", schedules[s->schedule]);
    if (given("--muon-lr") && !muon) return BAD("--muon-lr does nothing without --optimizer muon");
    if ((given("--beta2") || given("--variance-steps")) && !adamw)
        return BAD("%s does nothing with --optimizer %s, which has no second moments",
                   given("--beta2") ? "--beta2" : "--variance-steps", name);
    if (s->topk_momentum > 0 && (muon || is_optimizer(s, DTRAIN_OPTIMIZER_LION)))
        return BAD("--topk-momentum and --optimizer %s, which has a momentum of its own: use adamw "
                   "or sgd",
                   name);
    if (!((float)s->lr > 0)) return BAD("--lr is %g; it takes a learning rate above 0", s->lr);
    if (muon && s->tensor > 1)
        return BAD(
            "--optimizer muon needs whole matrices and --tensor %ld cuts them: use adamw, or "
            "leave --tensor out",
            s->tensor);
    if (muon && kind != DTRAIN_STRATEGY_DDP && kind != DTRAIN_STRATEGY_ZERO3)
        return BAD("--optimizer muon needs whole matrices and --strategy %s cuts them: use zero3, "
                   "which shards by whole tensors, or ddp",
                   strategies[s->strategy]);
    return 0;
}

/* Read --emulate, "2x4:10:50": two nodes of four ranks, 10 Gb/s, 50 us. Set the number of ranks. */
static int read_emulation(run_settings *s)
{
    double gbps = 0, latency_us = 0;
    long nodes = 0, ranks = 0;
    int used = 0;
    if (!s->emulate) return 0;
    const int found =
        sscanf(s->emulate, "%ldx%ld:%lf:%lf%n", &nodes, &ranks, &gbps, &latency_us, &used);
    if (found != 4 || s->emulate[used])
        return BAD("--emulate is \"%s\"; it takes NODESxRANKS:GBPS:LATENCY_US, as in 2x4:10:50",
                   s->emulate);
    if (nodes < 1 || ranks < 1 || nodes > DTRAIN_MAX_RANKS || ranks > DTRAIN_MAX_RANKS / nodes)
        return BAD(
            "--emulate %ldx%ld: nodes and ranks are at least 1, and their product at most %d",
            nodes, ranks, DTRAIN_MAX_RANKS);
    if (!(gbps > 0 && gbps <= 1e6) || !(latency_us >= 0 && latency_us <= 1e6))
        return BAD("--emulate %s: GBPS must be positive, at most 1e6, and LATENCY_US from 0 to 1e6",
                   s->emulate);
    if (s->ranks && s->ranks != nodes * ranks)
        return BAD("--ranks is %ld, and --emulate %s has %ld", s->ranks, s->emulate, nodes * ranks);
    if (s->comm && strcmp(s->comm, "local") != 0)
        return BAD("--emulate and --comm %s: it is the local communicator that emulates", s->comm);
    s->ranks = nodes * ranks;
    s->emulation.node_ranks = (uint32_t)ranks;
    s->emulation.gigabits_per_second = gbps;
    s->emulation.latency_us = latency_us;
    return 0;
}

/* Read --stage-units, "8,6": a number for each stage. */
static int read_stage_units(run_settings *s)
{
    const int stages = stage_count(s);
    const char *at = s->stage_units;
    if (!at) return 0;
    uint32_t *units =
        (uint32_t *)calloc((size_t)stages, sizeof *units); /* as long as the process */
    if (!units) return BAD("no memory for --stage-units");
    s->line.units = units;
    for (int stage = 0; at && stage < stages; stage++) {
        char *end;
        const long count = strtol(at, &end, 10);
        const char *const next = *end == ',' ? end + 1 : *end ? NULL : end;
        if (end == at || !next || count < 1 || count > INT32_MAX || (stage == stages - 1) != !*end)
            return BAD("--stage-units is \"%s\"; it takes %d numbers of 1 or more, one for each "
                       "stage, with commas between them",
                       s->stage_units, stages);
        units[stage] = (uint32_t)count;
        at = next;
    }
    return 0;
}

/* Refuse what does not go with a pipeline. */
static int check_pipeline(run_settings *s, const run_program *program)
{
    const long p = s->pipeline, all = p * s->tensor;
    s->line.kind = (uint32_t)s->pipeline_schedule;
    s->line.chunks = (uint32_t)s->chunks;
    if (p == 1 && (given("--chunks") || given("--pipeline-schedule") || s->stage_units))
        return BAD("%s does nothing without --pipeline above 1", given("--chunks") ? "--chunks"
                                                                 : given("--pipeline-schedule")
                                                                     ? "--pipeline-schedule"
                                                                     : "--stage-units");
    if (p == 1) return 0;
    if (!program->can_stage)
        return BAD("--pipeline %ld: this program runs passes of the whole model of its own; leave "
                   "--pipeline out",
                   p);
    if (s->graph)
        return BAD("--graph with --pipeline %ld: a recorded step has one micro-batch under way", p);
    if (s->ranks && s->ranks % all)
        return BAD("--tensor %ld x --pipeline %ld are %ld ranks, which do not divide --ranks %ld",
                   s->tensor, p, all, s->ranks);
    return read_stage_units(s);
}

/* Refuse a tensor axis that the program, or the other switches, cannot have. */
static int check_tensor(run_settings *s, const run_program *program)
{
    const long t = s->tensor;
    if (s->sequence_parallel && t == 1)
        return BAD("--sequence-parallel does nothing without --tensor above 1");
    if (check_pipeline(s, program)) return 2;
    if (t == 1) return 0;
    if (!program->can_cut)
        return BAD("--tensor %ld: no parameter of this model has a mark that lets ranks share it; "
                   "leave --tensor out",
                   t);
    if (s->ranks && s->ranks % t)
        return BAD("--tensor is %ld, which does not divide --ranks %ld", t, s->ranks);
    if (s->node_size % t)
        return BAD("--tensor is %ld, which does not divide --node-size %ld: a tensor axis stays "
                   "inside a node",
                   t, s->node_size);
    if (s->emulation.node_ranks % (uint32_t)t)
        return BAD(
            "--tensor is %ld, which does not divide the ranks of a node of --emulate %s, %u: "
            "a tensor axis stays inside a node",
            t, s->emulate, s->emulation.node_ranks);
    return 0;
}

/* The number of ranks that nobody has said: one node of them, if nodes have a size, and a tensor axis at least. */
static uint32_t default_ranks(const run_settings *s, bool trains)
{
    const long plain = trains && strcmp(s->device, "cpu") == 0 ? 2 : 1;
    if (trains && s->node_size > 1) return (uint32_t)s->node_size;
    return (uint32_t)(model_ranks(s) > plain ? model_ranks(s) : plain);
}

/* Find how many ranks there will be and which of them this process starts, or is. */
static int place_ranks(const run_settings *s, bool trains, dtrain_launch_place *place)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = (uint32_t)s->ranks;
    desc.default_rank_count = default_ranks(s, trains);
    if (s->thread_ranks) desc.mode = DTRAIN_LAUNCH_THREADS;
    if (dtrain_launch_plan(&desc, place) != DTRAIN_OK) return BAD("%s", dtrain_last_error());
    return 0;
}

/* Take the ranks that a launcher has left after a restart, and a layout that they can have. */
static void go_on_with_fewer(run_settings *s, const run_program *program)
{
    dtrain_launch_desc desc;
    dtrain_launch_place place;
    memset(&desc, 0, sizeof desc);
    desc.default_rank_count = default_ranks(s, true);
    desc.rank_count = (uint32_t)s->ranks;
    if (s->thread_ranks) return; /* no launcher starts them */
    if (dtrain_launch_plan(&desc, &place) != DTRAIN_OK) {
        desc.rank_count = 0; /* those of --ranks are not all there */
        if (dtrain_launch_plan(&desc, &place) != DTRAIN_OK) return;
        if (place.restart_count && place.rank_count < s->ranks) s->ranks = place.rank_count;
    }
    adapt_layout(s, program, &place);
}

/* Refuse what a strategy cannot do. *memory: what a rank needs, and *here: how many ranks share this machine. */
static int check_strategy(const run_settings *s, const run_program *program, bool trains,
                          dtrain_memory *memory, int *here)
{
    dtrain_launch_place place;
    if (place_ranks(s, trains, &place)) return 2;
    const int ranks = place.rank_count; /* *here: at least those that this process starts */
    *here = place.host_rank_count ? place.host_rank_count : place.started_count;
    if (ranks % (int)model_ranks(s))
        return BAD("--tensor %ld x --pipeline %ld are %ld ranks, which do not divide the %d there "
                   "are",
                   s->tensor, s->pipeline, model_ranks(s), ranks);
    const dtrain_result planned = plan_memory(s, program, ranks, memory);
    if (planned != DTRAIN_OK) {
        if (strncmp(dtrain_last_error(), "--", 2) != 0)
            name_error(planned, "--strategy", strategies[s->strategy]);
        return BAD("%s", dtrain_last_error());
    }
    return 0;
}

/* Refuse a run that needs more memory than there is. */
static int check_memory(const run_settings *s, const dtrain_memory *memory, int here)
{
    const bool cpu = strcmp(s->device, "cpu") == 0;
    const double have = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    if (cpu && (double)memory->total * here > have)
        return BAD("%d ranks need %.1f GiB each for parameters, gradients, optimizer and buffers; "
                   "this machine has %.1f GiB: use another --strategy, fewer --ranks or a smaller "
                   "model",
                   here, mib(memory->total) / 1024, have / 1073741824.0);
    if (s->memory_limit && mib(memory->total) > (double)s->memory_limit)
        return BAD("--memory-limit is %ld MiB and --strategy %s needs %.1f MiB a rank before any "
                   "activation: use one that shards more (full_shard, zero3, auto) or more --ranks",
                   s->memory_limit, strategies[s->strategy], mib(memory->total));
    return 0;
}

static int check_checkpoints(const run_settings *s)
{
    static const char *const needing[] = {"--save-every",    "--keep",     "--keep-best",
                                          "--save-blocking", "--restarts", "--set-aside"};
    for (size_t i = 0; i < sizeof needing / sizeof needing[0]; i++)
        if (given(needing[i]) && !s->checkpoints)
            return BAD("%s does nothing without --checkpoint DIR", needing[i]);
    if (s->resume && strcmp(s->resume, "auto") == 0 && !s->checkpoints)
        return BAD(
            "--resume auto looks into --checkpoint DIR, which is not given; or name a checkpoint");
    if (s->resume && strcmp(s->resume, "auto") == 0 && s->set_aside)
        return BAD("--resume auto goes on from what --set-aside moves away: use one of them");
    if (s->nonfinite == ROLLBACK && !s->checkpoints)
        return BAD("--nonfinite rollback needs --checkpoint DIR");
    return 0;
}

static int check_devices(const run_settings *s)
{
    const bool cpu = strcmp(s->device, "cpu") == 0;
    if (cpu && s->precision == TF32)
        return BAD("--precision tf32 needs a GPU (--device cuda): the cpu has no such arithmetic");
    if (cpu && s->offload)
        return BAD("--offload needs a GPU (--device cuda): the cpu's memory is the host's");
    if (cpu && (s->graph || s->tune_gemm))
        return BAD("%s needs a GPU (--device cuda)", s->graph ? "--graph" : "--tune-gemm");
    if (s->histograms && !s->tensorboard)
        return BAD("--histograms does nothing without --tensorboard DIR");
    if (s->accum && s->global_batch)
        return BAD("--accum and --global-batch: the second chooses the first; use one of them");
    if (s->deterministic && s->auto_batch && !s->memory_limit)
        return BAD("--deterministic and --auto-batch: free memory differs from run to run; give a "
                   "--memory-limit");
    if (s->deterministic && s->tune_gemm)
        return BAD("--deterministic and --tune-gemm: timings choose the bits; use one of them");
#ifdef DTRAIN_USE_CBLAS
    if (s->deterministic && cpu)
        return BAD("--deterministic: this build calls an external BLAS, whose bits may change from "
                   "run to run");
#endif
    return 0;
}

/* Probe a file that the run will write, and make its folders. A path of NULL: there is none. */
static int check_output(const char *name, const char *path, bool replaced)
{
    const char *why = path ? why_not_written(path, replaced) : NULL;
    return why ? BAD("%s %s cannot be written: %s", name, path, why) : 0;
}

/* Probe all that rank 0 will write, where this process starts it: what cannot be written is known before the first
 * step, not after the last one. The directories of checkpoints and TensorBoard are made before that step, too. */
static int check_outputs(const run_settings *s, const run_program *program, bool trains)
{
    const struct {
        const char *name, *path;
        bool replaced;
    } files[] = {{"--log", s->log, false},
                 {"--prometheus", s->prometheus, true},
                 {"--trace", s->trace, false},
                 {"--config-out", s->config_out, true}};
    dtrain_launch_place place;
    if (place_ranks(s, trains, &place)) return 2;
    if (place.first_rank > 0) return 0;
    for (int i = 0; i < COUNT(files); i++)
        if (check_output(files[i].name, files[i].path, files[i].replaced)) return 2;
    return program->check_outputs ? program->check_outputs() : 0;
}

/* Refuse switches that contradict each other, and what no strategy can do; *memory, *here as above. */
static int check_switches(run_settings *s, const run_program *program, bool trains,
                          dtrain_memory *memory, int *here)
{
    if (trains && (check_optimizer(s) || check_compression(s))) return 2;
    if (read_emulation(s) || check_tensor(s, program) || check_devices(s)) return 2;
    if (trains) go_on_with_fewer(s, program);
    if (check_strategy(s, program, trains, memory, here)) return 2;
    return check_checkpoints(s);
}

/* Refuse what no run of any program can be. */
static int check_run(run_settings *s, const run_program *program, bool trains)
{
    dtrain_memory memory;
    int here;
    if (check_switches(s, program, trains, &memory, &here)) return 2;
    return check_memory(s, &memory, here);
}

#endif /* RUN_CHECKS_H */
