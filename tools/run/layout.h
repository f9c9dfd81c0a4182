/* layout.h: the layout of a run that its launcher has started again with fewer ranks.
 *
 * What --tensor and --pipeline ask for may not divide these. Layouts are tried in this order, and the first one that
 * fits is taken: the tensor axis as it was asked for, then shorter ones; with each of them the pipeline as it was,
 * then shorter ones, then longer ones; all other ranks are replicas. A layout fits where the model can be divided so
 * (heads, units), a rank has the memory, and replicas share --global-batch evenly. */
#ifndef RUN_LAYOUT_H
#define RUN_LAYOUT_H

#include "tools/run/report.h"

/* Compare the sum of --stage-units with the units of the model. */
static dtrain_result check_stage_units(const run_settings *s, const run_job *j)
{
    uint64_t sum = 0, units = 0;
    if (!s->stage_units) return DTRAIN_OK;
    for (int stage = 0; stage < stage_count(s); stage++) sum += s->line.units[stage];
    for (size_t i = 0; i < j->param_count; i++) {
        size_t before = 0;
        while (j->params[before].unit != j->params[i].unit) before++;
        units += before == i;
    }
    if (sum == units) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_ARGUMENT,
        "--stage-units %s adds up to %llu units, and the model has %llu, each of which is in "
        "one stage",
        s->stage_units, (unsigned long long)sum, (unsigned long long)units);
}

/* Count, without allocating, a rank's parameters, gradients, optimizer and buffers, where so many ranks have the model
 * as the switches say. For auto: what its last choice needs. */
static dtrain_result plan_memory(const run_settings *s, const run_program *program, int ranks,
                                 dtrain_memory *memory)
{
    dtrain_compression_desc compression;
    dtrain_strategy_desc desc = strategy_desc(s, &compression);
    run_job j = new_job(s, program, calloc(1, program->own_bytes));
    if (!j.own) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a job");
    if (desc.kind == DTRAIN_STRATEGY_AUTO)
        desc.kind = s->pipeline > 1                   ? DTRAIN_STRATEGY_ZERO1
                    : ranks > s->tensor || s->offload ? DTRAIN_STRATEGY_FULL_SHARD
                                                      : DTRAIN_STRATEGY_DDP;
    dtrain_result result = open_mesh(NULL, ranks, &j);
    if (result == DTRAIN_OK) result = program->open_model(NULL, &j);
    desc.mesh = j.mesh;
    if (result == DTRAIN_OK) result = check_stage_units(s, &j);
    if (result == DTRAIN_OK)
        result = dtrain_strategy_plan(j.params, j.param_count, &desc, ranks, memory);
    program->close(&j);
    dtrain_mesh_destroy(j.mesh);
    free(j.own);
    return result;
}

/* Return the bytes that a rank may have of a machine that `here` of them share; 0: nobody knows. */
static double memory_of_rank(const run_settings *s, int here)
{
    const double have = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    const double share = strcmp(s->device, "cpu") == 0 ? have / here : 0;
    const double limit = 1048576.0 * (double)s->memory_limit;
    return limit > 0 && (share <= 0 || limit < share) ? limit : share;
}

/* Say whether so many ranks can have the model as the switches say; if not, the last error says why. */
static bool layout_fits(const run_settings *s, const run_program *program, int ranks, int here)
{
    const double room = memory_of_rank(s, here);
    uint32_t batch, accum;
    dtrain_memory memory;
    if (s->global_batch &&
        split_global_batch((uint64_t)s->global_batch, (uint32_t)s->batch,
                           ranks / (int)model_ranks(s), &batch, &accum) != DTRAIN_OK)
        return false;
    if (plan_memory(s, program, ranks, &memory) != DTRAIN_OK) return false;
    if (room <= 0 || (double)memory.total <= room) return true;
    dtrain_fail(DTRAIN_ERROR_MEMORY, "a rank needs %.1f MiB and may have %.1f", mib(memory.total),
                room / 1048576);
    return false;
}

/* Set the axes; a switch that would do nothing without one of them goes with it. */
static void set_layout(run_settings *s, long tensor, long pipeline)
{
    if (pipeline != s->pipeline) s->stage_units = NULL, s->line.units = NULL;
    s->tensor = tensor;
    s->pipeline = pipeline;
    if (tensor == 1) s->sequence_parallel = 0;
    if (pipeline > 1) return;
    s->chunks = s->pipeline_schedule = 0;
    memset(&s->line, 0, sizeof s->line);
}

/* Find the first layout that fits, in the order above, and set it in *s. why: what the last one that divides the ranks
 * and does not fit lacks. Return false where none fits. */
static bool find_layout(run_settings *s, const run_program *program, int ranks, int here, char *why,
                        size_t room)
{
    const run_settings asked = *s;
    for (long t = asked.tensor; t >= 1; t--) {
        const long rest = ranks / t;
        const long tries = asked.pipeline == 1 || rest < asked.pipeline ? asked.pipeline : rest;
        for (long i = 0; ranks % t == 0 && i < tries; i++) {
            const long p = i < asked.pipeline ? asked.pipeline - i : i + 1;
            if (rest % p) continue;
            *s = asked;
            set_layout(s, t, p);
            if (layout_fits(s, program, ranks, here)) return true;
            snprintf(why, room, "; tensor %ld x pipeline %ld x data %ld does not fit: %s", t, p,
                     rest / p, dtrain_last_error());
        }
    }
    *s = asked;
    return false;
}

/* Go on with the ranks that there are, after a restart by a launcher, in a layout that the model fits. Rank 0 says
 * which. Where none fits, the switches stay as they are: the checks say what is wrong with them. */
static void adapt_layout(run_settings *s, const run_program *program,
                         const dtrain_launch_place *place)
{
    const long tensor = s->tensor, pipeline = s->pipeline;
    const int ranks = place->rank_count;
    char why[512] = "";
    if (!place->restart_count || tensor * pipeline == 1) return;
    const int here = place->host_rank_count ? place->host_rank_count : place->started_count;
    if (!find_layout(s, program, ranks, here, why, sizeof why)) return;
    if (place->first_rank || (s->tensor == tensor && s->pipeline == pipeline)) return;
    printf("layout  restart %u has %d rank%s, for which --tensor %ld x --pipeline %ld %s: it goes "
           "on with tensor %ld x pipeline %ld x data %ld%s\n",
           place->restart_count, ranks, plural(ranks), tensor, pipeline,
           ranks % (tensor * pipeline) ? "do not come out even" : "do not fit", s->tensor,
           s->pipeline, ranks / model_ranks(s), why);
}

#endif /* RUN_LAYOUT_H */
