/* Do all ranks have the same?
 *
 * Lines of text are compared: in create the settings and one for each parameter, in the first step
 * over a pipeline the settings of the trainer. Values are compared in verify. First comes one hash
 * over all items; if ranks differ in that, item by item up to the first that differs. All ranks
 * see the same outcome of each comparison, so they make the same collectives. */

#include "core/platform_internal.h"
#include "comm/comm_internal.h"
#include "strategy/strategy_internal.h"

/* Hash an item, on every rank; 0: there is nothing to compare. */
typedef dtrain_result dtrain__hash_fn(dtrain_strategy *strategy, const char *settings, size_t item,
                                      uint64_t *hash);

/* The first item that is not the same on all ranks. */
typedef struct dtrain__difference {
    size_t item;
    int usual, odd; /* the first rank that has the most frequent value of it (a tie goes to the
                       lower rank), and the first with another value; -1: nothing differs */
} dtrain__difference;

/* Find the usual and the odd value of an item among those of all ranks. */
static void dtrain__find_odd(const int64_t *values, int ranks, dtrain__difference *found)
{
    int most = 0;
    for (int i = 0; i < ranks; i++) {
        int same = 0;
        for (int k = 0; k < ranks; k++) same += values[k] == values[i];
        if (same == ranks) return;
        if (same > most) found->usual = i;
        if (same > most) most = same;
    }
    for (found->odd = 0; values[found->odd] == values[found->usual];) found->odd++;
}

/* Compare `count` items of this rank with those of the others in comm; *all is the hash over all.
 * That is common where the largest and the smallest are equal: since ~ reverses the order, the
 * maximum of the complements is the complement of the minimum. */
static dtrain_result dtrain__compare_items(dtrain_strategy *strategy, dtrain_comm *comm,
                                           dtrain__hash_fn *hash_of, const char *settings,
                                           size_t count, uint64_t *all, dtrain__difference *found)
{
    uint64_t hash;
    *all = DTRAIN__FNV_BASIS;
    found->odd = -1;
    found->item = 0;
    for (size_t item = 0; item < count; item++) {
        DTRAIN__TRY(hash_of(strategy, settings, item, &hash));
        if (hash) *all = dtrain__fnv1a(*all, &hash, sizeof hash);
    }
    int64_t most[] = {(int64_t)*all, (int64_t) ~*all, (int64_t)count};
    DTRAIN__TRY(dtrain_all_reduce(comm, most, most, 3, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MAX, NULL));
    if (most[0] == ~most[1]) return DTRAIN_OK;
    for (;; found->item++) {
        DTRAIN__TRY(hash_of(strategy, settings, found->item, &hash));
        DTRAIN__TRY(dtrain_all_gather(comm, &hash, strategy->gathered, 1, DTRAIN_DTYPE_I64, NULL));
        dtrain__find_odd(strategy->gathered, dtrain_comm_size(comm), found);
        if (found->odd >= 0 || (int64_t)found->item + 1 == most[2]) return DTRAIN_OK;
    }
}

/* ---- What the host registered -----------------------------------------------------------------*/

#define DTRAIN__LINE_BYTES 832

/* Write line 0, the settings, or line i + 1, parameter i: compared by hash, and shown in errors. */
static void dtrain__registration_line(const dtrain_strategy *strategy, const char *settings,
                                      size_t line, char *text)
{
    const size_t room = DTRAIN__LINE_BYTES;
    char origin[64] = "values from the host", cut[192] = "";
    memset(text, 0, room);
    if (line == 0 || line > strategy->param_count) {
        if (line == 0) snprintf(text, room, "%s", settings);
        else snprintf(text, room, "only %zu parameters", strategy->param_count);
        return;
    }
    const dtrain_param *p = &strategy->params[line - 1];
    if (p->alias_of)
        snprintf(origin, sizeof origin, "alias of %zu", (size_t)(p->alias_of - strategy->params));
    else if (!p->value)
        snprintf(origin, sizeof origin, "init %u scale %.9g of %lld", (unsigned)p->init,
                 (double)p->init_scale,
                 (long long)(p->init_count ? p->init_count : dtrain__whole_count(p)));
    if (p->cut.axis)
        snprintf(cut, sizeof cut,
                 " cut by %s, %u components of %lld parts, widths %lld %lld %lld %lld,",
                 p->cut.axis == DTRAIN_CUT_ROWS ? "rows" : "columns", (unsigned)p->cut.components,
                 (long long)p->cut.parts, (long long)p->cut.widths[0], (long long)p->cut.widths[1],
                 (long long)p->cut.widths[2], (long long)p->cut.widths[3]);
    snprintf(text, room,
             "\"%.150s\" shape (%lld, %lld, %lld, %lld) unit %u flags 0x%x group %u,%s %s", p->name,
             (long long)p->shape[0], (long long)p->shape[1], (long long)p->shape[2],
             (long long)p->shape[3], (unsigned)p->unit, (unsigned)p->flags, (unsigned)p->group, cut,
             origin);
}

/* Hash a line, and the whole settings or name, which the line may have cut. */
static dtrain_result dtrain__registration_hash(dtrain_strategy *strategy, const char *settings,
                                               size_t line, uint64_t *hash)
{
    char text[DTRAIN__LINE_BYTES];
    dtrain__registration_line(strategy, settings, line, text);
    *hash = dtrain__fnv1a(DTRAIN__FNV_BASIS, text, strlen(text));
    if (line > strategy->param_count) return DTRAIN_OK;
    const char *whole = line ? strategy->params[line - 1].name : settings;
    *hash = dtrain__fnv1a(*hash, whole, strlen(whole));
    return DTRAIN_OK;
}

/* The sentence has the line of the usual rank and that of the odd one. */
DTRAIN__PRIVATE dtrain_result dtrain__lines_compare(dtrain_strategy *strategy, const char *call,
                                                    const char *what, const char *settings,
                                                    size_t count)
{
    dtrain_comm *comm = strategy->groups.all;
    char texts[2][DTRAIN__LINE_BYTES], name[48];
    dtrain__difference found;
    uint64_t all;
    DTRAIN__TRY(dtrain__compare_items(strategy, comm, dtrain__registration_hash, settings, count,
                                      &all, &found));
    if (found.odd < 0) return DTRAIN_OK;
    for (int i = 0; i < 2; i++) {
        dtrain__registration_line(strategy, settings, found.item, texts[i]);
        DTRAIN__TRY(dtrain_broadcast(comm, texts[i], DTRAIN__LINE_BYTES / 4, DTRAIN_DTYPE_I32,
                                     i ? found.odd : found.usual, NULL));
    }
    if (found.item) snprintf(name, sizeof name, "parameter %zu", found.item - 1);
    return dtrain_fail(
        DTRAIN_ERROR_MISMATCH,
        "%s: %s differs: rank %d has %s; rank %d has %s; give the same to every rank", call,
        found.item ? name : what, dtrain__world_rank(comm, found.usual), texts[0],
        dtrain__world_rank(comm, found.odd), texts[1]);
}

/* ---- Values -----------------------------------------------------------------------------------*/

/* Hash the bits of a parameter's value, of one that is cut of this rank's part; 0 for an alias, and
 * for what other stages have. Collective over the data axis. A step of the hash takes eight bytes
 * and is a bijection, so one changed word always changes the result; the shift brings the upper
 * half down, where a product alone would never carry it. */
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
    for (int64_t at = 0; at < whole.count; at += DTRAIN__STAGING_COUNT) {
        const int64_t count = dtrain__min(DTRAIN__STAGING_COUNT, whole.count - at);
        DTRAIN__TRY(dtrain_device_copy(strategy->device, staging, whole.value + at,
                                       (size_t)count * sizeof(float)));
        for (int64_t k = 0; k < count; k += 2) {
            uint64_t word = 0;
            memcpy(&word, staging + k, (size_t)dtrain__min(2, count - k) * sizeof(float));
            *hash = (*hash ^ word) * 0x9e3779b97f4a7c15u;
            *hash ^= *hash >> 32;
        }
    }
    return DTRAIN_OK;
}

/* Return a hash that is known. */
static dtrain_result dtrain__known_hash(dtrain_strategy *strategy, const char *settings, size_t i,
                                        uint64_t *hash)
{
    (void)settings;
    *hash = strategy->hashes[i];
    return DTRAIN_OK;
}

/* The same along the tensor axis, which has nothing to compare of what it cuts. */
static dtrain_result dtrain__known_whole(dtrain_strategy *strategy, const char *settings, size_t i,
                                         uint64_t *hash)
{
    (void)settings;
    *hash = strategy->params[i].cut.axis ? 0 : strategy->hashes[i];
    return DTRAIN_OK;
}

/* Compare values along an axis; *all is this rank's hash over them. */
static dtrain_result dtrain__compare_values(dtrain_strategy *strategy, dtrain_comm *comm,
                                            dtrain__hash_fn *hash_of, uint64_t *all)
{
    dtrain__difference found;
    DTRAIN__TRY(
        dtrain__strategy_keep(strategy, dtrain__compare_items(strategy, comm, hash_of, NULL,
                                                              strategy->param_count, all, &found)));
    if (found.odd < 0) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_MISMATCH,
        "dtrain_strategy_verify: the values of parameter %zu (\"%.100s\") on rank %d "
        "are not those of rank %d; every rank must make the same updates",
        found.item, strategy->params[found.item].name, dtrain__world_rank(comm, found.odd),
        dtrain__world_rank(comm, found.usual));
}

/* Compare the copies of tied weights that stages of several ranks have. */
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
        if (most[0] != ~most[1] && result == DTRAIN_OK)
            result =
                dtrain_fail(DTRAIN_ERROR_MISMATCH,
                            "dtrain_strategy_verify: the copies of parameter %zu (\"%.100s\"), "
                            "which is tied between stages, differ between rank %d and rank "
                            "%d; every rank must make the same updates",
                            i, strategy->params[i].name, dtrain__world_rank(comm, 0),
                            dtrain__world_rank(comm, dtrain_comm_size(comm) - 1));
    }
    return result;
}

/* Bring the hashes of all stages to each rank of a pipeline axis, each from the first rank that has
 * it, and make *all of them: that of one rank with the whole model. */
static dtrain_result dtrain__collect_hashes(dtrain_strategy *strategy, uint64_t *all)
{
    uint64_t *hashes = strategy->hashes;
    const size_t count = strategy->param_count;
    for (size_t i = 0; i < count; i++)
        if (dtrain__stage_first(strategy, i) != strategy->groups.pipeline_rank) hashes[i] = 0;
    DTRAIN__TRY(dtrain_all_reduce(strategy->groups.pipeline, hashes, hashes, count,
                                  DTRAIN_DTYPE_I64, DTRAIN_REDUCE_SUM, NULL));
    *all = DTRAIN__FNV_BASIS;
    for (size_t i = 0; i < count; i++)
        if (hashes[i]) *all = dtrain__fnv1a(*all, &hashes[i], sizeof hashes[i]);
    return DTRAIN_OK;
}

/* Fold the hashes of the parts of a model into one, the same on all ranks of a mesh that is
 * whole. */
static dtrain_result dtrain__fold_hashes(dtrain_strategy *strategy, uint64_t *all)
{
    dtrain_comm *tensor = strategy->groups.tensor;
    uint64_t *parts = (uint64_t *)(void *)strategy->gathered;
    if (strategy->groups.pipeline) DTRAIN__TRY(dtrain__collect_hashes(strategy, all));
    if (!tensor) return DTRAIN_OK;
    DTRAIN__TRY(dtrain_all_gather(tensor, all, parts, 1, DTRAIN_DTYPE_I64, NULL));
    *all =
        dtrain__fnv1a(DTRAIN__FNV_BASIS, parts, (size_t)dtrain_comm_size(tensor) * sizeof *parts);
    return DTRAIN_OK;
}

/* All values are hashed before any are compared: a difference is searched for by the ranks of one
 * axis alone, and hashing is collective over the other. All axes are compared in any case, and the
 * outcome is that of all ranks. */
DTRAIN_API dtrain_result dtrain_strategy_verify(dtrain_strategy *strategy, uint64_t *hash)
{
    uint64_t all, whole;
    if (hash) *hash = 0;
    DTRAIN__TRY(dtrain__between_backwards(strategy, "dtrain_strategy_verify"));
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
