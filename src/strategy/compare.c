/* Comparison of ranks: create compares the registered parameters, later calls compare flags, and
 * verify compares values. */

#include "core/platform_internal.h"
#include "comm/comm_internal.h"
#include "strategy/strategy_internal.h"

/* ---- What the host registered -----------------------------------------------------------------*/

/* What ranks compare of a parameter. */
typedef struct dtrain__compared_param {
    dtrain_param p;
    const char *values;
    int64_t alias_of; /* index of the target; -1: no alias */
} dtrain__compared_param;

#define DTRAIN__PARAM(field, type) DTRAIN__SAME_AS(dtrain__compared_param, p.field, #field, type)

/* clang-format off */
static const dtrain__same_field dtrain__param_fields[] = {
    DTRAIN__PARAM(name, TEXT), DTRAIN__PARAM(flags, FLAGS), DTRAIN__PARAM(dtype, UINT),
    DTRAIN__PARAM(shape, INT),
    DTRAIN__PARAM(unit, UINT), DTRAIN__PARAM(group, UINT), DTRAIN__PARAM(cut.axis, UINT),
    DTRAIN__PARAM(cut.components, UINT), DTRAIN__PARAM(cut.parts, INT),
    DTRAIN__PARAM(cut.widths, INT), DTRAIN__SAME(dtrain__compared_param, alias_of, INT),
    DTRAIN__SAME_AS(dtrain__compared_param, values, "values from", TEXT), DTRAIN__PARAM(init, UINT),
    DTRAIN__PARAM(init_scale, FLOAT), DTRAIN__PARAM(init_count, INT)};
/* clang-format on */

static void dtrain__compared_make(const void *at, size_t i, void *record)
{
    const dtrain_strategy *strategy = (const dtrain_strategy *)at;
    dtrain__compared_param *own = (dtrain__compared_param *)record;
    const dtrain_param *p = &strategy->params[i];
    const bool drawn = !p->alias_of && !dtrain__host_value(p);
    own->p = *p;
    own->alias_of = p->alias_of ? (int64_t)(p->alias_of - strategy->params) : -1;
    own->values = drawn ? "the library" : p->alias_of ? "its target" : "the host";
    if (!drawn) own->p.init = 0, own->p.init_scale = 0;
    own->p.init_count = !drawn ? 0 : p->init_count ? p->init_count : dtrain__whole_count(p);
}

DTRAIN__PRIVATE dtrain__same_list dtrain__same_params(const dtrain_strategy *strategy)
{
    const size_t fields = sizeof dtrain__param_fields / sizeof *dtrain__param_fields;
    const dtrain__same_list list = {"parameter", dtrain__param_fields,
                                    fields,      strategy->param_count,
                                    strategy,    dtrain__compared_make};
    return list;
}

DTRAIN__PRIVATE void dtrain__note_update(dtrain_strategy *strategy, float lr, float grad_scale)
{
    const float numbers[] = {lr, grad_scale};
    strategy->updates = dtrain__fnv1a(strategy->updates, numbers, sizeof numbers);
}

DTRAIN__PRIVATE dtrain_result dtrain__compare_now(dtrain_strategy *strategy, const char *call)
{
    static const dtrain__same_field field = DTRAIN__SAME_AS(
        dtrain_strategy, updates, "updates (lr and grad_scale of dtrain_optimizer_step)", HASH);
    dtrain__same_list lists[2] = {dtrain__same_struct(&field, 1, strategy),
                                  dtrain__same_params(strategy)};
    lists[1].field_count = 2; /* name and flags */
    return dtrain__same(strategy->groups.all, DTRAIN_OK, call, lists, 2);
}

/* ---- Values -----------------------------------------------------------------------------------*/

/* Hash the bits of a parameter's value; of a cut parameter, of this rank's part. The hash is 0 for
 * an alias, and for a parameter of other pipeline stages. Collective over the data axis. */
static dtrain_result dtrain__value_hash(dtrain_strategy *strategy, size_t i, uint64_t *hash)
{
    float staging[DTRAIN__STAGING_COUNT];
    dtrain_param whole;
    *hash = 0;
    if (strategy->params[i].state.storage != &strategy->params[i] ||
        !dtrain__has_memory(&strategy->params[i]))
        return DTRAIN_OK;
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__whole_param(strategy, i, &whole)));
    *hash = DTRAIN__FNV_BASIS;
    const int64_t words = dtrain__words(&strategy->layout, whole.count);
    for (int64_t at = 0; at < words; at += DTRAIN__STAGING_COUNT) {
        const int64_t count = dtrain__min(DTRAIN__STAGING_COUNT, words - at);
        DTRAIN__TRY(dtrain_device_copy(strategy->device, staging, whole.value + at,
                                       (size_t)count * sizeof(float)));
        *hash = dtrain__hash_words(*hash, staging, (size_t)count * sizeof(float));
    }
    return DTRAIN_OK;
}

/* Return the hash of a parameter. */
static uint64_t dtrain__known_hash(const void *user, size_t i)
{
    return ((const dtrain_strategy *)user)->hashes[i];
}

/* Return the hash for the tensor axis; 0 for a cut parameter, of which its ranks differ. */
static uint64_t dtrain__known_whole(const void *user, size_t i)
{
    const dtrain_strategy *strategy = (const dtrain_strategy *)user;
    return strategy->params[i].cut.axis ? 0 : strategy->hashes[i];
}

/* Compare values along an axis; *all becomes the hash over this rank's values. */
static dtrain_result dtrain__compare_values(dtrain_strategy *strategy, dtrain_comm *comm,
                                            dtrain__same_hash *hash_of, uint64_t *all)
{
    dtrain__difference found;
    DTRAIN__TRY(
        dtrain__strategy_keep(strategy, dtrain__same_find(comm, DTRAIN_OK, hash_of, strategy,
                                                          strategy->param_count, all, &found)));
    if (found.odd < 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                       "dtrain_strategy_verify: the values of parameter %zu (\"%s\") on rank %d "
                       "are not those of rank %d; every rank must make the same updates",
                       found.item, dtrain__short(strategy->params[found.item].name),
                       dtrain__world_rank(comm, found.odd), dtrain__world_rank(comm, found.usual));
}

/* Compare the copies of weights that pipeline stages tie. */
static dtrain_result dtrain__compare_copies(dtrain_strategy *strategy)
{
    dtrain_result result = DTRAIN_OK;
    for (size_t i = 0; i < strategy->param_count; i++) {
        dtrain_comm *comm = strategy->ties[i];
        const uint64_t hash = strategy->hashes[i];
        int64_t most[2] = {(int64_t)hash, (int64_t)~hash};
        if (!comm) continue;
        DTRAIN__TRY(
            dtrain__strategy_keep(strategy, dtrain_all_reduce(comm, most, most, 2, DTRAIN_DTYPE_I64,
                                                              DTRAIN_REDUCE_MAX, NULL)));
        if (most[0] == ~most[1] || result != DTRAIN_OK) continue;
        result =
            dtrain_fail(DTRAIN_ERROR_MISMATCH,
                        "dtrain_strategy_verify: the copies of parameter %zu (\"%s\"), which "
                        "is tied between stages, differ between rank %d and rank %d; every "
                        "rank must make the same updates",
                        i, dtrain__short(strategy->params[i].name), dtrain__world_rank(comm, 0),
                        dtrain__world_rank(comm, dtrain_comm_size(comm) - 1));
    }
    return result;
}

/* Fold the hashes of the parts of a model into one, the same on all ranks of a mesh. Along the
 * pipeline axis fold the hashes of all stages, each from the first rank that has the parameter, as
 * one rank with the whole model would. Along the tensor axis fold the hashes of its ranks. */
static dtrain_result dtrain__fold_hashes(dtrain_strategy *strategy, uint64_t *all)
{
    const dtrain__groups *groups = &strategy->groups;
    const size_t count = strategy->param_count;
    uint64_t *hashes = strategy->hashes, *parts = (uint64_t *)(void *)strategy->gathered;
    if (groups->pipeline) {
        for (size_t i = 0; i < count; i++)
            if (dtrain__stage_first(strategy, i) != groups->pipeline_rank) hashes[i] = 0;
        DTRAIN__TRY(dtrain_all_reduce(groups->pipeline, hashes, hashes, count, DTRAIN_DTYPE_I64,
                                      DTRAIN_REDUCE_SUM, NULL));
        *all = DTRAIN__FNV_BASIS;
        for (size_t i = 0; i < count; i++)
            if (hashes[i]) *all = dtrain__fnv1a(*all, &hashes[i], sizeof hashes[i]);
    }
    if (!groups->tensor) return DTRAIN_OK;
    DTRAIN__TRY(dtrain_all_gather(groups->tensor, all, parts, 1, DTRAIN_DTYPE_I64, NULL));
    *all = dtrain__fnv1a(DTRAIN__FNV_BASIS, parts,
                         (size_t)dtrain_comm_size(groups->tensor) * sizeof *parts);
    return DTRAIN_OK;
}

/* Hash all values before any comparison: only the ranks of one axis search for a difference, and
 * hashing is collective over the other axis. Compare along all axes in any case; all ranks get the
 * same outcome. */
DTRAIN_API dtrain_result dtrain_strategy_verify(dtrain_strategy *strategy, uint64_t *hash)
{
    uint64_t all, whole;
    if (hash) *hash = 0;
    DTRAIN__TRY(dtrain__between_backwards(strategy, "dtrain_strategy_verify"));
    DTRAIN__TRY(dtrain__compare_now(strategy, "dtrain_strategy_verify"));
    const dtrain__groups *groups = &strategy->groups;
    dtrain__note_units(strategy);
    for (size_t i = 0; i < strategy->param_count; i++)
        DTRAIN__TRY(
            dtrain__strategy_keep(strategy, dtrain__value_hash(strategy, i, &strategy->hashes[i])));
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__restore_units(strategy)));
    dtrain_result result = dtrain__compare_values(strategy, groups->data, dtrain__known_hash, &all);
    if (strategy->failure == DTRAIN_OK && groups->tensor) {
        const dtrain_result other =
            dtrain__compare_values(strategy, groups->tensor, dtrain__known_whole, &whole);
        if (result == DTRAIN_OK) result = other;
    }
    if (strategy->failure == DTRAIN_OK && groups->pipeline) {
        const dtrain_result other = dtrain__compare_copies(strategy);
        if (result == DTRAIN_OK) result = other;
    }
    if (groups->model) result = dtrain__agree(groups->all, result);
    if (groups->model && result == DTRAIN_OK)
        result = dtrain__strategy_keep(strategy, dtrain__fold_hashes(strategy, &all));
    DTRAIN__TRY(result);
    if (hash) *hash = all;
    return DTRAIN_OK;
}
