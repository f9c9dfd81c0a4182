/* Parameters, units, buckets
 *
 * Registration turns the host's array into three tables: what each entry is (dtrain__entry), which
 * gradients travel together (dtrain__bucket), and what all ranks must have in common (a line of
 * text per parameter, compared by hash).
 *
 *     params    0 wte    1 w1     2 b1     3 head          registration = forward order
 *     storage   0        1        2        0               head is an alias of wte
 *
 *     gradient region, one allocation, cut in buckets in launch order:
 *         | b1 ... pad | w1 ........ pad |  | wte .................... pad |
 *         |<---- bucket 0 (capped) ----->|  |<---------- bucket 1 -------->|
 *
 * Gradients become final in reverse forward order, so buckets are filled from the last parameter to
 * the first. A tied gradient is final when its last use, the first entry of the group, is done: it
 * travels at that entry's place. Every gradient starts on a cache line; padding is zero and stays
 * zero under the mean, so it costs bytes but never bits. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "world/world_internal.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "strategy/layout_internal.h"

/* A frozen target freezes its aliases; a frozen alias only gives up its own contribution. */
DTRAIN__PRIVATE bool dtrain__is_trainable(const dtrain_param *p)
{
    return !((p->flags | p->state.storage->flags) & DTRAIN_PARAM_FROZEN);
}

DTRAIN__PRIVATE int dtrain__param_dims(const dtrain_param *p)
{
    int dims = 0;
    while (dims < 4 && p->shape[dims]) dims++;
    return dims;
}

/* ---- Hashes -----------------------------------------------------------------------------------*/

/* FNV-1a (Fowler, Noll, Vo), 64 bits. */
DTRAIN__PRIVATE uint64_t dtrain__fnv1a(uint64_t hash, const void *bytes, size_t count)
{
    const unsigned char *at = (const unsigned char *)bytes;
    for (size_t i = 0; i < count; i++) hash = (hash ^ at[i]) * 0x100000001b3u;
    return hash;
}

/* ---- Checking what the host registered --------------------------------------------------------*/

DTRAIN__PRINTF(3, 4)
DTRAIN__PRIVATE dtrain_result dtrain__param_fail(const dtrain_param *p, size_t index,
                                                 const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_strategy_create: parameter %zu (\"%.100s\"): %s", index,
                       p->name ? p->name : "", text);
}

/* Makes count and shape agree; the host may have left either to the other. */
static dtrain_result dtrain__resolve_shape(dtrain_param *p, size_t index)
{
    const int dims = dtrain__param_dims(p);
    size_t product = 1, bytes;
    if (p->count < 0) return dtrain__param_fail(p, index, "count is %lld", (long long)p->count);
    for (int d = 0; d < 4; d++) {
        if (p->shape[d] < 0 || (d >= dims && p->shape[d]))
            return dtrain__param_fail(p, index,
                                      "shape (%lld, %lld, %lld, %lld) must be positive sizes "
                                      "followed by zeros",
                                      (long long)p->shape[0], (long long)p->shape[1],
                                      (long long)p->shape[2], (long long)p->shape[3]);
        if (d < dims && !dtrain__size_mul(product, (size_t)p->shape[d], &product))
            return dtrain__param_fail(p, index, "the product of its shape overflows");
    }
    if (dims == 0) p->shape[0] = p->count;
    else if (p->count == 0 && product <= INT64_MAX) p->count = (int64_t)product;
    if (dims && (size_t)p->count != product)
        return dtrain__param_fail(p, index, "count is %lld, its shape has %zu elements",
                                  (long long)p->count, product);
    if (!dtrain__size_mul((size_t)p->count, sizeof(float), &bytes) || bytes > SIZE_MAX / 4)
        return dtrain__param_fail(p, index, "%lld elements are more than memory can hold",
                                  (long long)p->count);
    return DTRAIN_OK;
}

/* The storage of an alias is that of an earlier entry: chains end, and are resolved in one
 * pass. An alias without a shape takes its target's. */
static dtrain_result dtrain__resolve_alias(dtrain_param *params, size_t index)
{
    dtrain_param *p = &params[index];
    const uintptr_t distance = (uintptr_t)p->alias_of - (uintptr_t)params;
    if (distance % sizeof *p || distance / sizeof *p >= index)
        return dtrain__param_fail(p, index,
                                  "alias_of must point to an earlier entry of the same array");
    dtrain_param *storage = p->alias_of->state.storage;
    if (p->count == 0 && p->shape[0] == 0) {
        p->count = storage->count;
        memcpy(p->shape, storage->shape, sizeof p->shape);
    }
    if (p->count != storage->count)
        return dtrain__param_fail(
            p, index, "it has %lld elements, \"%.100s\" that it is an alias of has %lld",
            (long long)p->count, storage->name, (long long)storage->count);
    if ((p->value && p->value != storage->value) || (p->grad && p->grad != storage->grad))
        return dtrain__param_fail(p, index,
                                  "an alias shares value and grad of its target: leave its "
                                  "own pointers NULL");
    p->state.storage = storage;
    return DTRAIN_OK;
}

/* Quadratic, once, over 64-bit hashes: a thousand parameters take a millisecond. */
static dtrain_result dtrain__check_names(const dtrain_param *params, size_t count, uint64_t *hashes)
{
    for (size_t i = 0; i < count; i++) {
        hashes[i] = dtrain__fnv1a(DTRAIN__FNV_BASIS, params[i].name, strlen(params[i].name));
        for (size_t k = 0; k < i; k++)
            if (hashes[k] == hashes[i] && strcmp(params[k].name, params[i].name) == 0)
                return dtrain__param_fail(&params[i], i, "parameter %zu has the same name", k);
    }
    return DTRAIN_OK;
}

/* Checks the array and fills in its shapes, counts and states. */
DTRAIN__PRIVATE dtrain_result dtrain__resolve_params(dtrain_param *params, size_t count,
                                                     const dtrain_allocator *a)
{
    size_t total = 0;
    for (size_t i = 0; i < count; i++) {
        dtrain_param *p = &params[i];
        if (!p->name || !*p->name) return dtrain__param_fail(p, i, "it needs a name");
        if (p->flags & ~(DTRAIN_PARAM_FROZEN | DTRAIN_PARAM_NO_DECAY))
            return dtrain__param_fail(p, i, "flags 0x%x has bits that mean nothing",
                                      (unsigned)p->flags);
        if (p->init > DTRAIN_INIT_UNIFORM)
            return dtrain__param_fail(p, i, "init %u is not a dtrain_init", (unsigned)p->init);
        DTRAIN__TRY(dtrain__resolve_shape(p, i));
        memset(&p->state, 0, sizeof p->state);
        p->state.storage = p;
        p->state.index = (uint32_t)i;
        if (p->alias_of) DTRAIN__TRY(dtrain__resolve_alias(params, i));
        const size_t bytes = dtrain__round_up((size_t)p->count * sizeof(float), DTRAIN__CACHE_LINE);
        if (!dtrain__size_add(total, bytes, &total) || total > SIZE_MAX / 4)
            return dtrain__param_fail(p, i, "with it the model is larger than memory can hold");
    }
    uint64_t *hashes = (uint64_t *)dtrain__alloc(a, count, sizeof *hashes, "name hashes");
    if (!hashes) return DTRAIN_ERROR_MEMORY;
    const dtrain_result result = dtrain__check_names(params, count, hashes);
    dtrain__free(a, hashes, count, sizeof *hashes);
    return result;
}

/* ---- Ranks agree
 *
 * A call that fails on one rank only would leave the others waiting in its next collective. Calls
 * that do local work in between therefore bring its outcome here: all ranks leave with success, or
 * all with an error, and the communicator is as good as before. */

typedef struct dtrain__verdict {
    int32_t code;
    char text[DTRAIN__ERROR_BYTES];
} dtrain__verdict;

DTRAIN__PRIVATE dtrain_result dtrain__agree(dtrain_comm *comm, dtrain_result mine)
{
    dtrain__verdict verdict;
    int32_t first = mine == DTRAIN_OK ? INT32_MAX : (int32_t)dtrain_comm_rank(comm);
    if (dtrain_comm_size(comm) == 1) return mine;
    memset(&verdict, 0, sizeof verdict);
    verdict.code = (int32_t)mine;
    snprintf(verdict.text, sizeof verdict.text, "%s", dtrain__bare(dtrain_last_error()));
    DTRAIN__TRY(
        dtrain_all_reduce(comm, &first, &first, 1, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_MIN, NULL));
    if (first == INT32_MAX) return DTRAIN_OK;
    DTRAIN__TRY(
        dtrain_broadcast(comm, &verdict, sizeof verdict / 4, DTRAIN_DTYPE_I32, (int)first, NULL));
    if (mine != DTRAIN_OK) return mine; /* one's own sentence is still the last error */
    return dtrain_fail((dtrain_result)verdict.code, "rank %d failed: %s",
                       dtrain__world_rank(comm, (int)first), verdict.text);
}

/* Do all ranks have the same value? One small all-reduce tells, without memory for all of them:
 * since ~ reverses the order, the maximum of the complements is the complement of the minimum. */
DTRAIN__PRIVATE dtrain_result dtrain__is_common(dtrain_comm *comm, uint64_t value, bool *common)
{
    int64_t pair[2] = {(int64_t)value, (int64_t)~value};
    *common = true;
    if (dtrain_comm_size(comm) == 1) return DTRAIN_OK;
    DTRAIN__TRY(dtrain_all_reduce(comm, pair, pair, 2, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MAX, NULL));
    *common = pair[0] == ~pair[1];
    return DTRAIN_OK;
}

/* Finds, of values that differ, the first rank that has what most have (a tie goes to the lower
 * rank), and the first that has something else. gathered (size) is scratch. */
DTRAIN__PRIVATE dtrain_result dtrain__odd_rank(dtrain_comm *comm, uint64_t value, int64_t *gathered,
                                               int *usual, int *odd)
{
    const int size = dtrain_comm_size(comm);
    const int64_t mine = (int64_t)value;
    int most = 0;
    DTRAIN__TRY(dtrain_all_gather(comm, &mine, gathered, 1, DTRAIN_DTYPE_I64, NULL));
    *usual = *odd = 0;
    for (int i = 0; i < size; i++) {
        int same = 0;
        for (int k = 0; k < size; k++) same += gathered[k] == gathered[i];
        if (same > most) *usual = i;
        if (same > most) most = same;
    }
    while (*odd < size - 1 && gathered[*odd] == gathered[*usual]) ++*odd;
    return DTRAIN_OK;
}

/* ---- All ranks must have registered the same --------------------------------------------------*/

#define DTRAIN__LINE_BYTES 768

typedef struct dtrain__registration {
    const dtrain_param *params;
    size_t count;
    const char *settings; /* of the strategy */
} dtrain__registration;

/* Line 0 is the settings, line i + 1 parameter i. What is compared is what is shown. */
static void dtrain__registration_line(const dtrain__registration *mine, size_t line, char *text)
{
    const size_t room = DTRAIN__LINE_BYTES;
    char origin[64];
    memset(text, 0, room);
    if (line == 0 || line > mine->count) {
        if (line == 0) snprintf(text, room, "%s", mine->settings);
        else snprintf(text, room, "only %zu parameters", mine->count);
        return;
    }
    const dtrain_param *p = &mine->params[line - 1];
    if (p->alias_of)
        snprintf(origin, sizeof origin, "alias of %zu", (size_t)(p->alias_of - mine->params));
    else if (p->value) snprintf(origin, sizeof origin, "values from the host");
    else
        snprintf(origin, sizeof origin, "init %u scale %.9g", (unsigned)p->init,
                 (double)p->init_scale);
    snprintf(text, room, "\"%.150s\" shape (%lld, %lld, %lld, %lld) unit %u flags 0x%x, %s",
             p->name, (long long)p->shape[0], (long long)p->shape[1], (long long)p->shape[2],
             (long long)p->shape[3], (unsigned)p->unit, (unsigned)p->flags, origin);
}

/* The line's text may have cut a long name: the whole name is hashed too. */
static uint64_t dtrain__registration_hash(const dtrain__registration *mine, size_t line)
{
    char text[DTRAIN__LINE_BYTES];
    dtrain__registration_line(mine, line, text);
    const uint64_t hash = dtrain__fnv1a(DTRAIN__FNV_BASIS, text, strlen(text));
    if (line == 0 || line > mine->count) return hash;
    const char *name = mine->params[line - 1].name; /* the line may have cut it */
    return dtrain__fnv1a(hash, name, strlen(name));
}

/* Fails on all ranks with the line of the usual rank and that of the odd one. */
static dtrain_result dtrain__registration_differs(dtrain_comm *comm,
                                                  const dtrain__registration *mine, size_t line,
                                                  int64_t *gathered)
{
    char usual_text[DTRAIN__LINE_BYTES], odd_text[DTRAIN__LINE_BYTES], what[48] = "the desc";
    int usual, odd;
    dtrain__registration_line(mine, line, usual_text);
    dtrain__registration_line(mine, line, odd_text);
    DTRAIN__TRY(
        dtrain__odd_rank(comm, dtrain__registration_hash(mine, line), gathered, &usual, &odd));
    DTRAIN__TRY(
        dtrain_broadcast(comm, usual_text, DTRAIN__LINE_BYTES / 4, DTRAIN_DTYPE_I32, usual, NULL));
    DTRAIN__TRY(
        dtrain_broadcast(comm, odd_text, DTRAIN__LINE_BYTES / 4, DTRAIN_DTYPE_I32, odd, NULL));
    if (line) snprintf(what, sizeof what, "parameter %zu", line - 1);
    return dtrain_fail(
        DTRAIN_ERROR_MISMATCH,
        "dtrain_strategy_create: %s differs: rank %d has %s; rank %d has %s; register "
        "the same on every rank",
        what, dtrain__world_rank(comm, usual), usual_text, dtrain__world_rank(comm, odd), odd_text);
}

/* One hash of everything when all is well; otherwise line by line, up to the first that
 * differs. The outcome of each step is the same on all ranks, so they stay in step, and no
 * memory is needed. */
DTRAIN__PRIVATE dtrain_result dtrain__registration_compare(dtrain_comm *comm,
                                                           const dtrain_param *params, size_t count,
                                                           const char *settings, int64_t *gathered)
{
    const dtrain__registration mine = {params, count, settings};
    int64_t lines = (int64_t)count + 1;
    uint64_t all = DTRAIN__FNV_BASIS;
    bool common;
    for (size_t line = 0; line <= count; line++) {
        const uint64_t hash = dtrain__registration_hash(&mine, line);
        all = dtrain__fnv1a(all, &hash, sizeof hash);
    }
    DTRAIN__TRY(dtrain__is_common(comm, all, &common));
    if (common) return DTRAIN_OK;
    DTRAIN__TRY(
        dtrain_all_reduce(comm, &lines, &lines, 1, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MAX, NULL));
    for (size_t line = 0; line < (size_t)lines; line++) {
        DTRAIN__TRY(dtrain__is_common(comm, dtrain__registration_hash(&mine, line), &common));
        if (!common) return dtrain__registration_differs(comm, &mine, line, gathered);
    }
    return dtrain_fail(DTRAIN_ERROR_INTERNAL,
                       "dtrain_strategy_create: registrations differ, but no line does");
}
