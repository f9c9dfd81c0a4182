/* Stages: the part of a model on a rank of a pipeline axis
 *
 * Units are put into stages in the order in which they first appear in the array of parameters, and
 * stages are given to the ranks in turn. Every rank registers the whole array. A parameter of other
 * ranks' stages has no memory on this rank and a count of 0:
 *
 *     2 ranks, 2 chunks     unit 0 1 2 | 3 4 | 5 6 | 7 8
 *     stage                      0     |  1  |  2  |  3
 *     rank                       0     |  1  |  0  |  1
 *
 * A weight that is tied between stages of several ranks has a copy on each. All copies are drawn
 * from the random stream of one index, so they start equal. TIE (ties.c) adds up their gradients
 * before any other step, so they stay equal. The first of these ranks counts the weight if the
 * model's weights are to count once. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "comm/comm.h"
#include "parallel/chunks_internal.h"
#include "strategy/strategy_internal.h"

/* ---- Which stage ------------------------------------------------------------------------------*/

DTRAIN__PRIVATE int32_t dtrain__stage_of_unit(const dtrain__stage_map *map, uint32_t unit)
{
    for (size_t u = 0; u < map->unit_count; u++)
        if ((uint32_t)map->units[2 * u] == unit) return map->units[2 * u + 1];
    return -1;
}

DTRAIN__PRIVATE dtrain_result dtrain__stage_map_make(dtrain__stage_map *map,
                                                     const dtrain_allocator *a,
                                                     const dtrain_param *params, size_t count,
                                                     const dtrain_pipeline_desc *desc,
                                                     const dtrain__groups *groups)
{
    const char *const call = "dtrain_strategy_create";
    memset(map, 0, sizeof *map);
    map->ranks = groups->pipeline_ranks;
    map->rank = groups->pipeline_rank;
    DTRAIN__TRY(dtrain__pipeline_chunks(desc, map->ranks, &map->chunks));
    map->stages = map->ranks * map->chunks;
    map->room = count;
    map->units = (int32_t *)dtrain__alloc(a, count, 2 * sizeof *map->units, "stages of units");
    if (!map->units) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < count; i++) /* units in the order of their first parameters */
        if (dtrain__stage_of_unit(map, params[i].unit) < 0)
            map->units[2 * map->unit_count++] = (int32_t)params[i].unit;
    const uint32_t *units = desc && map->stages > 1 ? desc->units : NULL;
    uint64_t sum = 0;
    for (int32_t s = 0; s < map->stages && units; s++) {
        sum += units[s];
        if (!units[s])
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "%s: pipeline->units gives stage %d of %d no unit; give it one, or "
                               "take fewer ranks or chunks",
                               call, (int)s, (int)map->stages);
    }
    if (units && sum != map->unit_count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: the %d numbers of pipeline->units add up to %llu units, and the "
                           "parameters belong to %zu; every unit is in one stage",
                           call, (int)map->stages, (unsigned long long)sum, map->unit_count);
    if (map->unit_count < (size_t)map->stages && map->stages > 1)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "%s: the parameters belong to %zu units, which leave a stage of %d (%d ranks "
            "x %d chunks) empty; take fewer ranks or chunks, or give the model more units",
            call, map->unit_count, (int)map->stages, map->ranks, map->chunks);
    const size_t even = map->unit_count / (size_t)map->stages;
    const size_t more = map->unit_count % (size_t)map->stages; /* stages with one unit more */
    size_t at = 0;
    for (int32_t s = 0; s < map->stages; s++) {
        const size_t own = units ? units[s] : even + ((size_t)s < more);
        for (size_t u = 0; u < own; u++) map->units[2 * at++ + 1] = s;
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__stage_map_free(dtrain__stage_map *map, const dtrain_allocator *a)
{
    dtrain__free(a, map->units, map->room, 2 * sizeof *map->units);
    memset(map, 0, sizeof *map);
}

/* ---- Parameters -------------------------------------------------------------------------------*/

/* True if a rank of the axis uses a storage, by any of its entries. */
DTRAIN__PRIVATE bool dtrain__stage_uses(const dtrain__stage_map *map, const dtrain_param *storage,
                                        int rank)
{
    const dtrain_param *p = storage;
    do {
        if (dtrain__stage_of_unit(map, p->unit) % map->ranks == rank) return true;
        p = p->state.next;
    } while (p != storage);
    return false;
}

/* Mark the parameters that this rank does not use, and set the count of unused storages to 0. */
DTRAIN__PRIVATE void dtrain__stage_params(const dtrain__stage_map *map, dtrain_param *params,
                                          size_t count)
{
    for (size_t i = 0; i < count && map->ranks > 1; i++) {
        dtrain_param *p = &params[i];
        p->state.remote = dtrain__stage_of_unit(map, p->unit) % map->ranks != map->rank;
        if (!dtrain__stage_uses(map, p->state.storage, map->rank)) p->count = 0;
    }
}

DTRAIN__PRIVATE bool dtrain__has_memory(const dtrain_param *param)
{
    return param->count || !param->state.remote;
}

DTRAIN__PRIVATE int dtrain__stage_first(const dtrain_strategy *strategy, size_t i)
{
    const dtrain_param *storage = strategy->params[i].state.storage;
    int rank = 0;
    while (!dtrain__stage_uses(&strategy->stages, storage, rank)) rank++;
    return rank;
}
