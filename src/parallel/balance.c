/* Units to stages, by what they cost
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
 * Where a rank has several stages it is the slowest rank that sets the pace, and no such recurrence
 * knows a rank's other stages. There the borders found so move on by a unit at a time, as long as
 * the largest rank, or else the sum of squares of the ranks, gets less. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "parallel/pipeline.h"
#include "parallel/schedule_internal.h"

typedef struct dtrain__balance {
    size_t units, stages;
    double *sums;   /* (units + 1) cost of the first u units */
    double *best;   /* (units + 1) of the stages so far ... */
    double *before; /* (units + 1) ... and of one stage less */
    uint32_t *from; /* (stages, units + 1) the first unit of the last stage */
} dtrain__balance;

static dtrain_result dtrain__balance_check(const dtrain_pipeline_costs *costs, size_t unit_count,
                                           int stages, const uint32_t *out)
{
    const char *const call = "dtrain_pipeline_balance";
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
static void dtrain__balance_stage(dtrain__balance *b, size_t stage, double limit, bool squares)
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
static double dtrain__balance_find(dtrain__balance *b, double limit, bool squares)
{
    for (size_t j = 0; j <= b->units; j++) b->best[j] = j ? HUGE_VAL : 0;
    for (size_t stage = 0; stage < b->stages; stage++)
        dtrain__balance_stage(b, stage, limit, squares);
    return b->best[b->units];
}

/* What the ranks have of a division: the largest, and the sum of squares. */
typedef struct dtrain__rank_loads {
    double largest, squares;
} dtrain__rank_loads;

static dtrain__rank_loads dtrain__balance_loads(const dtrain__balance *b, uint32_t kind, int ranks,
                                                const uint32_t *out, double *loads)
{
    dtrain__rank_loads all = {0, 0};
    size_t first = 0;
    for (int r = 0; r < ranks; r++) loads[r] = 0;
    for (size_t stage = 0; stage < b->stages; first += out[stage++])
        loads[dtrain__pipeline_place(kind, ranks, (int)stage).rank] +=
            b->sums[first + out[stage]] - b->sums[first];
    for (int r = 0; r < ranks; r++) {
        all.largest = fmax(all.largest, loads[r]);
        all.squares += loads[r] * loads[r];
    }
    return all;
}

/* Move one unit between neighbour stages, where that is better; false: nowhere. A difference that
 * rounding may have made is none. */
static bool dtrain__balance_move(const dtrain__balance *b, uint32_t kind, int ranks, uint32_t *out,
                                 double *loads)
{
    const dtrain__rank_loads now = dtrain__balance_loads(b, kind, ranks, out, loads);
    for (size_t border = 1; border < b->stages; border++)
        for (int right = 0; right < 2; right++) {
            uint32_t *const from = &out[right ? border : border - 1];
            uint32_t *const to = &out[right ? border - 1 : border];
            if (*from == 1) continue;
            --*from, ++*to;
            const dtrain__rank_loads then = dtrain__balance_loads(b, kind, ranks, out, loads);
            if (then.largest < now.largest * (1 - 1e-9) ||
                (then.largest <= now.largest && then.squares < now.squares * (1 - 1e-9)))
                return true;
            ++*from, --*to;
        }
    return false;
}

DTRAIN_API dtrain_result dtrain_pipeline_balance(const dtrain_pipeline_costs *costs,
                                                 size_t unit_count,
                                                 const dtrain_pipeline_desc *desc, int ranks,
                                                 uint32_t *out)
{
    const dtrain_allocator a = dtrain__resolve_allocator(NULL);
    const size_t room = unit_count + 1;
    int chunks;
    dtrain__balance b;
    memset(&b, 0, sizeof b);
    DTRAIN__TRY(dtrain__pipeline_sizes("dtrain_pipeline_balance", desc, ranks, 1, &chunks));
    DTRAIN__TRY(dtrain__balance_check(costs, unit_count, ranks * chunks, out));
    b.units = unit_count;
    b.stages = (size_t)(ranks * chunks);
    const size_t count = 3 * room + (size_t)ranks;
    double *const numbers = (double *)dtrain__alloc(&a, count, sizeof *numbers, "costs");
    b.from = (uint32_t *)dtrain__alloc(&a, room, b.stages * sizeof *b.from, "stages of units");
    if (numbers && b.from) {
        b.sums = numbers;
        b.best = numbers + room;
        b.before = numbers + 2 * room;
        for (size_t u = 0; u < unit_count; u++)
            b.sums[u + 1] = b.sums[u] + (costs[u].forward + costs[u].backward + costs[u].weight);
        dtrain__balance_find(&b, dtrain__balance_find(&b, HUGE_VAL, false), true);
        size_t end = unit_count;
        for (size_t stage = b.stages; stage-- > 0;) {
            const size_t first = b.from[stage * room + end];
            out[stage] = (uint32_t)(end - first);
            end = first;
        }
        while (chunks > 1 && dtrain__balance_move(&b, desc->kind, ranks, out, numbers + 3 * room)) {
        }
    }
    const dtrain_result result = numbers && b.from ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    dtrain__free(&a, numbers, count, sizeof *numbers);
    dtrain__free(&a, b.from, room, b.stages * sizeof *b.from);
    return result;
}
