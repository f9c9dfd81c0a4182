/* balance.h: divides the units of a model among the stages of a pipeline, by what they cost: balance_model, and
 * balance_units for costs that are known.
 *
 * The slowest stage sets the pace of a pipeline, so its cost is made as small as it can be. Many
 * partitions share that cost; of these the one with the least sum of squares is taken, which is the
 * most even. Both are found by dynamic programming over contiguous runs of units: with cost(i, j)
 * of units i to j - 1,
 *
 *     best(s, j) = min over i < j of  best(s - 1, i) combined with cost(i, j)
 *
 * once combined by the maximum, and once, where no cost may exceed that, by adding squares. Takes
 * at most stages * units^2 / 2 steps each.
 *
 * Where a rank has several stages it is not one of them that sets the pace, and no such recurrence
 * knows a rank's other stages. There a replay of the schedule tells what a division takes, and
 * units go from stage to stage one at a time as long as that gets less. */
#ifndef TOOLS_BALANCE_H
#define TOOLS_BALANCE_H

#include "tools/schedule.h"

typedef struct balance_table {
    size_t units, stages;
    double *sums;   /* (units + 1) cost of the first u units */
    double *best;   /* (units + 1) of the stages so far ... */
    double *before; /* (units + 1) ... and of one stage less */
    uint32_t *from; /* (stages, units + 1) the first unit of the last stage */
} balance_table;

static inline dtrain_result balance_check_units(const dtrain_pipeline_costs *costs,
                                                size_t unit_count, int stages, const uint32_t *out)
{
    const char *const call = "balance_units";
    if (!costs || !out || unit_count > INT32_MAX)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: expected costs, room for the result and fewer than 2^31 units, and "
                           "found %zu units",
                           call, unit_count);
    if (unit_count < (size_t)stages)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: %zu units leave a stage of %d empty; take fewer ranks or chunks, "
                           "or give the model more units",
                           call, unit_count, stages);
    for (size_t u = 0; u < unit_count; u++) {
        const double sum = costs[u].forward + costs[u].backward + costs[u].weight;
        if (!(sum >= 0 && sum <= 1e100))
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "%s: unit %zu of %zu costs %g, expected a number from 0 to 1e100",
                               call, u, unit_count, sum);
    }
    return DTRAIN_OK;
}

/* Add the next stage: its last unit is before j, and its cost at most `limit`. Of equal partitions
 * the one that begins it earlier is taken: earlier stages, whose ranks hold more micro-batches,
 * have fewer units. */
static inline void balance_stage(balance_table *b, size_t stage, double limit, bool squares)
{
    double *const last = b->before;
    b->before = b->best;
    b->best = last;
    for (size_t j = 0; j <= b->units; j++) {
        b->best[j] = HUGE_VAL;
        for (size_t i = stage; i < j; i++) {
            const double cost = b->sums[j] - b->sums[i];
            const double all = squares               ? b->before[i] + cost * cost
                               : cost > b->before[i] ? cost
                                                     : b->before[i];
            if (cost > limit || all >= b->best[j]) continue;
            b->best[j] = all;
            b->from[stage * (b->units + 1) + j] = (uint32_t)i;
        }
    }
}

/* Find the best way to divide all units, and what it costs. */
static inline double balance_find(balance_table *b, double limit, bool squares)
{
    for (size_t j = 0; j <= b->units; j++) b->best[j] = j ? HUGE_VAL : 0;
    for (size_t stage = 0; stage < b->stages; stage++) balance_stage(b, stage, limit, squares);
    return b->best[b->units];
}

/* A division that is made better by replays of its schedule. */
typedef struct balance_division {
    const dtrain_pipeline_costs *costs; /* (units) */
    const dtrain_pipeline_schedule *schedule;
    size_t stages;
    uint32_t *out;                   /* (stages) units */
    dtrain_pipeline_costs *of_stage; /* (stages) their sums */
} balance_division;

/* Replay the schedule with the sums of all stages' units. */
static inline dtrain_result balance_division_takes(const balance_division *d, double *makespan)
{
    const dtrain_pipeline_costs *unit = d->costs;
    schedule_report report;
    memset(d->of_stage, 0, d->stages * sizeof *d->of_stage);
    for (size_t stage = 0; stage < d->stages; stage++)
        for (uint32_t i = 0; i < d->out[stage]; i++, unit++) {
            d->of_stage[stage].forward += unit->forward;
            d->of_stage[stage].backward += unit->backward;
            d->of_stage[stage].weight += unit->weight;
        }
    SCHEDULE_TRY(schedule_check(d->schedule, d->of_stage, 0, &report));
    *makespan = report.makespan;
    return DTRAIN_OK;
}

/* Take the best of the moves of one unit to a neighbour stage, or by as many stages as there are
 * ranks; *better false: none takes less. A difference that rounding may have made is none. */
static inline dtrain_result balance_division_move(const balance_division *d, double *least,
                                                  bool *better)
{
    const size_t steps[] = {1, (size_t)d->schedule->ranks};
    uint32_t *from = NULL, *to = NULL;
    for (size_t stage = 0; stage < d->stages; stage++)
        for (int k = 0; k < 4; k++) {
            const size_t there = k % 2 ? stage + steps[k / 2] : stage - steps[k / 2];
            double takes;
            if (there >= d->stages || d->out[stage] == 1) continue;
            d->out[stage]--, d->out[there]++;
            const dtrain_result result = balance_division_takes(d, &takes);
            d->out[stage]++, d->out[there]--;
            SCHEDULE_TRY(result);
            if (takes >= *least * (1 - 1e-9)) continue;
            *least = takes, from = &d->out[stage], to = &d->out[there];
        }
    *better = from != NULL;
    if (from) --*from, ++*to;
    return DTRAIN_OK;
}

/* Move units between stages as long as a step takes less. */
static inline dtrain_result balance_division_improve(const dtrain_pipeline_costs *costs,
                                                     const dtrain_pipeline_schedule *schedule,
                                                     uint32_t *out)
{
    balance_division d = {costs, schedule, (size_t)(schedule->ranks * schedule->chunks), out, NULL};
    double least;
    bool better = true;
    d.of_stage = (dtrain_pipeline_costs *)calloc(d.stages, sizeof *d.of_stage);
    if (!d.of_stage) return dtrain_fail(DTRAIN_ERROR_MEMORY, "balance_units: no memory for costs");
    dtrain_result result = balance_division_takes(&d, &least);
    while (result == DTRAIN_OK && better) result = balance_division_move(&d, &least, &better);
    free(d.of_stage);
    return result;
}

/* Divide units, whatever a rank's other stages are. */
static inline dtrain_result balance_divide(const dtrain_pipeline_costs *costs, size_t unit_count,
                                           size_t stages, uint32_t *out)
{
    const size_t room = unit_count + 1;
    balance_table b;
    memset(&b, 0, sizeof b);
    b.units = unit_count;
    b.stages = stages;
    double *const numbers = (double *)calloc(3 * room, sizeof *numbers);
    b.from = (uint32_t *)calloc(room, b.stages * sizeof *b.from);
    if (numbers && b.from) {
        b.sums = numbers;
        b.best = numbers + room;
        b.before = numbers + 2 * room;
        for (size_t u = 0; u < unit_count; u++)
            b.sums[u + 1] = b.sums[u] + (costs[u].forward + costs[u].backward + costs[u].weight);
        balance_find(&b, balance_find(&b, HUGE_VAL, false), true);
        size_t end = unit_count;
        for (size_t stage = b.stages; stage-- > 0;) {
            const size_t first = b.from[stage * room + end];
            out[stage] = (uint32_t)(end - first);
            end = first;
        }
    }
    const bool done = numbers && b.from;
    free(numbers);
    free(b.from);
    return done ? DTRAIN_OK
                : dtrain_fail(DTRAIN_ERROR_MEMORY, "balance_units: no memory for %zu units",
                              unit_count);
}

/* Divide units among the stages of a pipeline by their costs: out[ranks * chunks] is how many units each stage has, for
 * dtrain_pipeline_desc.units; desc->units is not read, and desc NULL = a zeroed one. Stages are runs of units in their
 * order, none is empty, and the stage with the largest sum of forward, backward and weight has as little as possible;
 * the others are as even as that allows, earlier ones with fewer units. With several stages a rank (INTERLEAVED)
 * units then move between them as long as schedule_check finds that a step of so many micro-batches takes less. Memory
 * is not looked at. costs[unit_count] are those of dtrain_trainer_unit_costs or the program's; equal ones on every rank
 * give equal results. */
static inline dtrain_result balance_units(const dtrain_pipeline_costs *costs, size_t unit_count,
                                          const dtrain_pipeline_desc *desc, int ranks,
                                          int micro_batches, uint32_t *out)
{
    dtrain_pipeline_schedule *schedule;
    SCHEDULE_TRY(dtrain_pipeline_create(desc, ranks, micro_batches, &schedule));
    const int stages = ranks * schedule->chunks;
    dtrain_result result = balance_check_units(costs, unit_count, stages, out);
    if (result == DTRAIN_OK) result = balance_divide(costs, unit_count, (size_t)stages, out);
    if (result == DTRAIN_OK && schedule->chunks > 1)
        result = balance_division_improve(costs, schedule, out);
    dtrain_pipeline_destroy(schedule);
    return result;
}

/* Divide the units of a model among the stages of a pipeline by what dtrain_trainer_unit_costs counts: out[ranks *
 * chunks] as above. trainer is the desc that the run will have, before there is a strategy. Local: ranks whose batches
 * have the same shape find the same. */
static inline dtrain_result balance_model(dtrain_world *world, const dtrain_trainer_desc *trainer,
                                          const dtrain_param *params, size_t param_count,
                                          const dtrain_pipeline_desc *desc, int ranks,
                                          uint32_t *out)
{
    const int micro_batches = trainer->micro_batches ? (int)trainer->micro_batches : 1;
    size_t units;
    dtrain_pipeline_costs *costs = (dtrain_pipeline_costs *)calloc(param_count, sizeof *costs);
    if (!costs) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for the costs of units");
    dtrain_result result =
        dtrain_trainer_unit_costs(world, trainer, params, param_count, costs, NULL, &units);
    if (result == DTRAIN_OK) result = balance_units(costs, units, desc, ranks, micro_batches, out);
    free(costs);
    return result;
}

#endif /* TOOLS_BALANCE_H */
