/* stages.h: --dry-run of a pipeline: its table of stages, what a rank of each needs, and the bubble.
 *
 * What units cost is counted by dtrain_trainer_unit_costs, as a run does before it divides them; the schedule is
 * replayed by schedule_check (tools/schedule.h) with the costs of these stages. */
#ifndef PLAN_STAGES_H
#define PLAN_STAGES_H

#include "tools/plan/machine.h"

typedef struct stage_plan {
    const run_settings *s;
    const run_program *program;
    int ranks, stages;
    uint32_t batch, accum;
    uint64_t workspace;              /* of a rank's process */
    run_job j;                       /* with the model's parameters */
    dtrain_pipeline_costs *costs;    /* (units) */
    dtrain_pipeline_costs *of_stage; /* (stages) their sums */
    uint64_t *kept;                  /* (units) bytes of a micro-batch */
    size_t units;
    uint32_t *divided; /* (stages) units */
    dtrain_pipeline_schedule *schedule;
    double total, makespan, bubble; /* in the unit of costs: the total is of all micro-batches */
} stage_plan;

/* Count what the units cost and divide them, in a world of one rank. */
static int count_units(dtrain_world *world, void *user)
{
    stage_plan *p = (stage_plan *)user;
    run_job *j = &p->j;
    dtrain_result result = DTRAIN_OK;
    TRY(p->program->open_model(world, j));
    TRY(p->program->set_batch(j->own, p->batch));
    const dtrain_trainer_desc trainer = trainer_desc(world, j);
    const size_t room = j->param_count, stages = (size_t)p->stages;
    p->costs = (dtrain_pipeline_costs *)calloc(room, sizeof *p->costs);
    p->kept = (uint64_t *)calloc(room, sizeof *p->kept);
    p->of_stage = (dtrain_pipeline_costs *)calloc(stages, sizeof *p->of_stage);
    p->divided = (uint32_t *)calloc(stages, sizeof *p->divided);
    if (!p->costs || !p->kept || !p->of_stage || !p->divided)
        TRY(dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a table of stages"));
    TRY(dtrain_trainer_unit_costs(world, &trainer, j->params, room, p->costs, p->kept, &p->units));
    if (p->s->line.units) memcpy(p->divided, p->s->line.units, stages * sizeof *p->divided);
    else
        TRY(balance_units(p->costs, p->units, &p->s->line, (int)p->s->pipeline, (int)p->accum,
                          p->divided));
cleanup:
    return result == DTRAIN_OK ? 0 : 1;
}

/* Add up the costs of the units of each stage, and replay the schedule with them. */
static dtrain_result replay_stages(stage_plan *p)
{
    schedule_report report;
    size_t unit = 0;
    dtrain_result result = DTRAIN_OK;
    for (int stage = 0; stage < p->stages; stage++)
        for (uint32_t i = 0; i < p->divided[stage]; i++, unit++) {
            p->of_stage[stage].forward += p->costs[unit].forward;
            p->of_stage[stage].backward += p->costs[unit].backward;
            p->of_stage[stage].weight += p->costs[unit].weight;
            p->total += p->accum *
                        (p->costs[unit].forward + p->costs[unit].backward + p->costs[unit].weight);
        }
    TRY(dtrain_pipeline_create(&p->s->line, (int)p->s->pipeline, (int)p->accum, &p->schedule));
    TRY(schedule_check(p->schedule, p->of_stage, 0, &report));
    p->makespan = report.makespan;
    p->bubble = report.bubble;
cleanup:
    return result;
}

/* Return the first unit of a stage, in the order of units. */
static size_t first_unit(const stage_plan *p, int stage)
{
    size_t first = 0;
    for (int before = 0; before < stage; before++) first += p->divided[before];
    return first;
}

/* Find the place of a unit in the order of first parameters. */
static size_t unit_place(const run_job *j, uint32_t unit)
{
    size_t place = 0;
    for (size_t i = 0; j->params[i].unit != unit; i++) {
        size_t before = 0;
        while (j->params[before].unit != j->params[i].unit) before++;
        place += before == i;
    }
    return place;
}

/* Tell whether a unit is in a chunk of a rank, or (chunk -1) in any of them. */
static bool unit_is_in(const stage_plan *p, size_t place, int rank, int chunk)
{
    const dtrain_pipeline_schedule *s = p->schedule;
    for (int c = chunk < 0 ? 0 : chunk; c < (chunk < 0 ? s->chunks : chunk + 1); c++) {
        const int stage = c * s->ranks + rank;
        const size_t first = first_unit(p, stage);
        if (place >= first && place < first + p->divided[stage]) return true;
    }
    return false;
}

/* Copy the parameters of a chunk of a rank, or (-1) of all of them, and count the copies. A tied one whose other uses
 * are elsewhere has memory of its own here. */
static size_t copy_stage_params(const stage_plan *p, int rank, int chunk, dtrain_param *to)
{
    size_t count = 0;
    for (size_t i = 0; i < p->j.param_count; i++) {
        const dtrain_param *param = &p->j.params[i], *storage = param;
        dtrain_param *copy = &to[count];
        size_t before = 0;
        if (!unit_is_in(p, unit_place(&p->j, param->unit), rank, chunk)) continue;
        while (storage->alias_of) storage = storage->alias_of;
        while (before < count && to[before].value != (const void *)storage) before++;
        *copy = *storage;
        copy->name = param->name;
        copy->unit = param->unit;
        copy->value = (float *)(uintptr_t)storage; /* until all are there: for the search above */
        copy->grad = NULL;
        copy->alias_of = before < count ? &to[before] : NULL;
        memset(&copy->state, 0, sizeof copy->state);
        count++;
    }
    for (size_t i = 0; i < count; i++) to[i].value = NULL;
    return count;
}

/* Count the elements of the parameters of a stage. */
static long long stage_params(const stage_plan *p, int rank, int chunk, dtrain_param *room)
{
    const size_t count = copy_stage_params(p, rank, chunk, room);
    long long sum = 0;
    for (size_t i = 0; i < count; i++) {
        long long elements = room[i].shape[0] ? 1 : (long long)room[i].count;
        for (int axis = 0; axis < 4 && room[i].shape[axis]; axis++) elements *= room[i].shape[axis];
        sum += room[i].alias_of ? 0 : elements;
    }
    return sum;
}

/* Count what a rank of the pipeline holds beside activations: its stages are a model of their own, without one. */
static dtrain_result plan_stage_rank(const stage_plan *p, int rank, dtrain_param *room,
                                     dtrain_memory *memory)
{
    dtrain_compression_desc compression;
    dtrain_strategy_desc desc = strategy_desc(p->s, &compression);
    dtrain_mesh_desc grid;
    dtrain_mesh *mesh = NULL;
    dtrain_result result = DTRAIN_OK;
    memset(&grid, 0, sizeof grid);
    grid.tensor = (int)p->s->tensor;
    grid.sequence_parallel = p->s->sequence_parallel != 0;
    grid.ranks = p->ranks / (int)p->s->pipeline;
    TRY(dtrain_mesh_create(NULL, &grid, &mesh));
    desc.pipeline = NULL;
    desc.mesh = mesh;
    if (desc.kind == DTRAIN_STRATEGY_AUTO) desc.kind = DTRAIN_STRATEGY_ZERO1; /* its first choice */
    TRY(dtrain_strategy_plan(room, copy_stage_params(p, rank, -1, room), &desc, grid.ranks,
                             memory));
cleanup:
    dtrain_mesh_destroy(mesh);
    return result;
}

/* Count the activations of the passes that a rank holds at once, each of one of its stages. */
static double held_bytes(const stage_plan *p, int rank, int slots)
{
    double bytes = 0;
    for (size_t unit = 0; unit < p->units; unit++)
        if (unit_is_in(p, unit, rank, -1)) bytes += (double)p->kept[unit];
    return slots * bytes / p->schedule->chunks / (double)p->s->tensor;
}

/* Print a rank's stages, one a line; the last has what the rank needs. */
static dtrain_result print_rank(const stage_plan *p, int rank, dtrain_param *room)
{
    const dtrain_pipeline_schedule *schedule = p->schedule;
    schedule_report report;
    dtrain_memory memory;
    dtrain_result result = DTRAIN_OK;
    TRY(schedule_check(schedule, p->of_stage, rank, &report));
    TRY(plan_stage_rank(p, rank, room, &memory));
    const double held = held_bytes(p, rank, report.slots) / 1048576;
    for (int chunk = 0; chunk < schedule->chunks; chunk++) {
        const int stage = chunk * schedule->ranks + rank;
        const dtrain_pipeline_costs *c = &p->of_stage[stage];
        const double share = p->accum * (c->forward + c->backward + c->weight) / p->total;
        char units[32];
        const size_t first = first_unit(p, stage);
        snprintf(units, sizeof units, "%zu-%zu", first, first + p->divided[stage] - 1);
        printf("# %5d %5d %9s %12lld %7.1f", rank, stage, units, stage_params(p, rank, chunk, room),
               100 * share);
        if (chunk == schedule->chunks - 1)
            printf(" %10d %12.1f %10.1f", report.slots, held,
                   mib(memory.total + p->workspace) + held);
        printf("\n");
    }
cleanup:
    return result;
}

/* Print the table. */
static dtrain_result print_stages(stage_plan *p)
{
    dtrain_param *room = (dtrain_param *)malloc((p->j.param_count + 1) * sizeof *room);
    dtrain_result result = DTRAIN_OK;
    if (!room) TRY(dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a table of stages"));
    TRY(replay_stages(p));
    printf("# %5s %5s %9s %12s %7s %10s %12s %10s\n", "rank", "stage", "units", "parameters",
           "flops %", "in flight", "MiB of these", "MiB a rank");
    for (int rank = 0; rank < p->s->pipeline; rank++) TRY(print_rank(p, rank, room));
cleanup:
    free(room);
    return result;
}

static void free_stages(stage_plan *p)
{
    if (p->j.own) p->program->close(&p->j);
    dtrain_pipeline_destroy(p->schedule);
    free(p->j.own);
    free(p->costs);
    free(p->of_stage);
    free(p->kept);
    free(p->divided);
}

#endif /* PLAN_STAGES_H */
