/* Parameters, units, buckets
 *
 * Registration checks the host's array and compares it with that of the other ranks (a line of text
 * per parameter, by hash). layout.c makes two tables of it: entries, and buckets of gradients that
 * travel together.
 *
 *     params    0 wte    1 w1     2 b1     3 head          registration = forward order
 *     storage   0        1        2        0               head is an alias of wte
 *
 *     gradient region, one allocation, cut in buckets in launch order:
 *         | b1 ... pad | w1 ........ pad |  | wte .................... pad |
 *         |<---- bucket 0 (capped) ----->|  |<---------- bucket 1 -------->|
 *
 * Gradients become final in reverse forward order, so buckets are filled from the last parameter to
 * the first. A tied gradient is final when backward has come to its first entry, the storage, and
 * has its place in the order there. Every gradient starts on a cache line. Padding is zero and
 * stays zero under the mean, so that it changes no bits. */

#include "core/platform_internal.h"
#include "comm/comm_internal.h"
#include "strategy/strategy_internal.h"
#include "device/device_internal.h"

DTRAIN__PRIVATE int dtrain__param_dims(const dtrain_param *p)
{
    int dims = 0;
    while (dims < 4 && p->shape[dims]) dims++;
    return dims;
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

/* Complete count from shape or shape from count, and check that they agree. */
static dtrain_result dtrain__resolve_shape(dtrain_param *p, size_t index)
{
    const int dims = dtrain__param_dims(p);
    size_t product = dims ? 1 : (size_t)p->count, bytes;
    bool fits = true;
    if (p->count < 0) return dtrain__param_fail(p, index, "count is %lld", (long long)p->count);
    if (!dims && !p->count && !p->alias_of)
        return dtrain__param_fail(p, index, "count and shape are 0; give one of them");
    for (int d = 0; d < 4; d++) {
        if (p->shape[d] < 0 || (d >= dims && p->shape[d]))
            return dtrain__param_fail(p, index,
                                      "shape (%lld, %lld, %lld, %lld) must be positive sizes "
                                      "followed by zeros",
                                      (long long)p->shape[0], (long long)p->shape[1],
                                      (long long)p->shape[2], (long long)p->shape[3]);
        if (d < dims) fits = fits && dtrain__size_mul(product, (size_t)p->shape[d], &product);
    }
    if (!fits || !dtrain__size_mul(product, sizeof(float), &bytes) || bytes > SIZE_MAX / 4)
        return dtrain__param_fail(p, index, "it has more elements than memory can hold");
    if (dims == 0) p->shape[0] = p->count;
    if (p->count == 0) p->count = (int64_t)product;
    if ((size_t)p->count == product) return DTRAIN_OK;
    return dtrain__param_fail(p, index, "count is %lld, its shape has %zu elements",
                              (long long)p->count, product);
}

/* Find the storage of an alias. Its target is an earlier entry, whose storage is known: so one pass
 * resolves chains too. An alias without a shape takes that of its target. */
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
    if (p->group && p->group != storage->group)
        return dtrain__param_fail(p, index,
                                  "its group is %u, that of \"%.100s\" that it is an alias of %u: "
                                  "they are one parameter; leave it 0",
                                  (unsigned)p->group, storage->name, (unsigned)storage->group);
    p->state.storage = storage;
    p->state.next = storage->state.next;
    storage->state.next = p;
    return DTRAIN_OK;
}

/* Set grad_written of a storage and of all its aliases: a host reads that of the entry that it is
 * working on. Without a strategy `next` is NULL. */
DTRAIN__PRIVATE void dtrain__set_grad_written(dtrain_param *storage, bool written)
{
    dtrain_param *p = storage;
    do {
        p->state.grad_written = written;
        p = p->state.next;
    } while (p && p != storage);
}

/* Check the array and fill in its shapes, counts and states. Names are compared each with each,
 * once: a thousand parameters take some milliseconds. */
DTRAIN__PRIVATE dtrain_result dtrain__resolve_params(dtrain_param *params, size_t count)
{
    size_t total = 0;
    for (size_t i = 0; i < count; i++) {
        dtrain_param *p = &params[i];
        if (!p->name || !*p->name) return dtrain__param_fail(p, i, "it needs a name");
        for (size_t k = 0; k < i; k++)
            if (strcmp(params[k].name, p->name) == 0)
                return dtrain__param_fail(p, i, "parameter %zu has the same name", k);
        if (p->flags & DTRAIN_PARAM_BUFFER) p->flags |= DTRAIN_PARAM_FROZEN;
        if (p->flags & ~(DTRAIN_PARAM_FROZEN | DTRAIN_PARAM_NO_DECAY | DTRAIN_PARAM_BUFFER))
            return dtrain__param_fail(p, i, "flags 0x%x has bits that mean nothing",
                                      (unsigned)p->flags);
        if (p->init > DTRAIN_INIT_UNIFORM)
            return dtrain__param_fail(p, i, "init %u is not a dtrain_init", (unsigned)p->init);
        DTRAIN__TRY(dtrain__resolve_shape(p, i));
        if (p->init_count < 0 || p->init_count > p->count)
            return dtrain__param_fail(p, i, "init_count is %lld, of %lld elements",
                                      (long long)p->init_count, (long long)p->count);
        memset(&p->state, 0, sizeof p->state);
        p->state.storage = p->state.next = p;
        p->state.index = (uint32_t)i;
        if (p->alias_of) DTRAIN__TRY(dtrain__resolve_alias(params, i));
        const size_t bytes = dtrain__round_up((size_t)p->count * sizeof(float), DTRAIN__CACHE_LINE);
        if (!dtrain__size_add(total, bytes, &total) || total > SIZE_MAX / 4)
            return dtrain__param_fail(p, i, "with it the model is larger than memory can hold");
    }
    return DTRAIN_OK;
}

/* ---- All ranks must have the same -------------------------------------------------------------*/

/* Tell whether all ranks have the same value. One small all-reduce is enough, without memory for
 * all of them: since ~ reverses the order, the maximum of the complements is the complement of the
 * minimum. */
static dtrain_result dtrain__is_common(dtrain_comm *comm, uint64_t value, bool *common)
{
    int64_t pair[2] = {(int64_t)value, (int64_t)~value};
    *common = true;
    if (dtrain_comm_size(comm) == 1) return DTRAIN_OK;
    DTRAIN__TRY(dtrain_all_reduce(comm, pair, pair, 2, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MAX, NULL));
    *common = pair[0] == ~pair[1];
    return DTRAIN_OK;
}

/* Compare items by their hashes: first one hash over all items, *all; if ranks differ in that, item
 * by item up to the first that differs. All ranks see the same outcome of each comparison, so they
 * make the same collectives. found->usual is the first rank that has the most frequent value of the
 * item (a tie goes to the lower rank), found->odd the first with another value; -1: nothing
 * differs. gathered (size) is scratch. */
DTRAIN__PRIVATE dtrain_result dtrain__compare_items(dtrain_comm *comm, dtrain__hash_fn hash_of,
                                                    void *user, size_t count, int64_t *gathered,
                                                    uint64_t *all, dtrain__difference *found)
{
    const int size = dtrain_comm_size(comm);
    int64_t longest = (int64_t)count;
    int most = 0;
    uint64_t hash;
    bool common;
    *all = DTRAIN__FNV_BASIS;
    found->odd = -1;
    found->usual = 0;
    for (size_t item = 0; item < count; item++) {
        DTRAIN__TRY(hash_of(user, item, &hash));
        if (hash) *all = dtrain__fnv1a(*all, &hash, sizeof hash);
    }
    DTRAIN__TRY(dtrain__is_common(comm, *all, &common));
    if (common) return DTRAIN_OK;
    DTRAIN__TRY(
        dtrain_all_reduce(comm, &longest, &longest, 1, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MAX, NULL));
    found->item = 0;
    do {
        DTRAIN__TRY(hash_of(user, found->item, &hash));
        DTRAIN__TRY(dtrain__is_common(comm, hash, &common));
    } while (common && ++found->item < (size_t)longest);
    const int64_t mine = (int64_t)hash;
    DTRAIN__TRY(dtrain_all_gather(comm, &mine, gathered, 1, DTRAIN_DTYPE_I64, NULL));
    for (int i = 0; i < size; i++) {
        int same = 0;
        for (int k = 0; k < size; k++) same += gathered[k] == gathered[i];
        if (same > most) found->usual = i;
        if (same > most) most = same;
    }
    for (found->odd = 0; found->odd < size - 1; found->odd++)
        if (gathered[found->odd] != gathered[found->usual]) break;
    return DTRAIN_OK;
}

#define DTRAIN__LINE_BYTES 768

typedef struct dtrain__registration {
    const dtrain_param *params;
    size_t count;
    const char *settings; /* of the strategy */
} dtrain__registration;

/* Write line 0, the settings, or line i + 1, parameter i: compared by hash, and shown in errors. */
static void dtrain__registration_line(const dtrain__registration *mine, size_t line, char *text)
{
    const size_t room = DTRAIN__LINE_BYTES;
    char origin[64] = "values from the host";
    memset(text, 0, room);
    if (line == 0 || line > mine->count) {
        if (line == 0) snprintf(text, room, "%s", mine->settings);
        else snprintf(text, room, "only %zu parameters", mine->count);
        return;
    }
    const dtrain_param *p = &mine->params[line - 1];
    if (p->alias_of)
        snprintf(origin, sizeof origin, "alias of %zu", (size_t)(p->alias_of - mine->params));
    else if (!p->value)
        snprintf(origin, sizeof origin, "init %u scale %.9g of %lld", (unsigned)p->init,
                 (double)p->init_scale, (long long)(p->init_count ? p->init_count : p->count));
    snprintf(text, room,
             "\"%.150s\" shape (%lld, %lld, %lld, %lld) unit %u flags 0x%x "
             "group %u, %s",
             p->name, (long long)p->shape[0], (long long)p->shape[1], (long long)p->shape[2],
             (long long)p->shape[3], (unsigned)p->unit, (unsigned)p->flags, (unsigned)p->group,
             origin);
}

/* Hash a line, and the whole name, which the line may have cut. */
static dtrain_result dtrain__registration_hash(void *user, size_t line, uint64_t *hash)
{
    const dtrain__registration *mine = (const dtrain__registration *)user;
    char text[DTRAIN__LINE_BYTES];
    dtrain__registration_line(mine, line, text);
    const char *name = line && line <= mine->count ? mine->params[line - 1].name : "";
    *hash = dtrain__fnv1a(DTRAIN__FNV_BASIS, text, strlen(text));
    *hash = dtrain__fnv1a(*hash, name, strlen(name));
    return DTRAIN_OK;
}

/* Fail on all ranks if they have registered different parameters or settings; the sentence has the
 * line of the usual rank and of the odd one. */
DTRAIN__PRIVATE dtrain_result dtrain__registration_compare(dtrain_strategy *strategy,
                                                           const char *settings)
{
    dtrain__registration mine = {strategy->params, strategy->param_count, settings};
    dtrain_comm *comm = strategy->comm;
    char texts[2][DTRAIN__LINE_BYTES], what[48] = "the desc";
    dtrain__difference found;
    uint64_t all;
    DTRAIN__TRY(dtrain__compare_items(comm, dtrain__registration_hash, &mine, mine.count + 1,
                                      strategy->gathered, &all, &found));
    if (found.odd < 0) return DTRAIN_OK;
    for (int i = 0; i < 2; i++) {
        dtrain__registration_line(&mine, found.item, texts[i]);
        DTRAIN__TRY(dtrain_broadcast(comm, texts[i], DTRAIN__LINE_BYTES / 4, DTRAIN_DTYPE_I32,
                                     i ? found.odd : found.usual, NULL));
    }
    if (found.item) snprintf(what, sizeof what, "parameter %zu", found.item - 1);
    return dtrain_fail(
        DTRAIN_ERROR_MISMATCH,
        "dtrain_strategy_create: %s differs: rank %d has %s; rank %d has %s; register "
        "the same on every rank",
        what, dtrain__world_rank(comm, found.usual), texts[0], dtrain__world_rank(comm, found.odd),
        texts[1]);
}

/* ---- Values -----------------------------------------------------------------------------------*/

#define DTRAIN__STAGING_COUNT 4096 /* elements; on the stack, so that nothing can fail */

/* Initialise value (count; host or device memory) as elements [first, first + count) of parameter
 * p. An element is a function of (seed, parameter, element) only: the same on every rank, however
 * values are sharded. */
DTRAIN__PRIVATE dtrain_result dtrain__init_param(dtrain_device *device, const dtrain_param *p,
                                                 uint64_t seed, int64_t first, int64_t count,
                                                 float *value)
{
    const float scale = p->init_scale;
    const size_t bytes = (size_t)count * sizeof(float);
    float staging[DTRAIN__STAGING_COUNT];
    if (p->init == DTRAIN_INIT_ZERO && count > 0) {
        if (!dtrain__on_host(device, value)) return device->ops->zero(device, value, bytes);
        memset(value, 0, bytes);
        return DTRAIN_OK;
    }
    for (int64_t at = 0; at < count; at += DTRAIN__STAGING_COUNT) {
        const int64_t some = dtrain__min(DTRAIN__STAGING_COUNT, count - at);
        const uint64_t from = (uint64_t)(first + at);
        if (p->init == DTRAIN_INIT_NORMAL || p->init == DTRAIN_INIT_UNIFORM)
            dtrain__random_fill(seed, p->state.index, from, some, p->init == DTRAIN_INIT_NORMAL,
                                scale, staging);
        else
            for (int64_t i = 0; i < some; i++) staging[i] = scale;
        const int64_t left = p->init_count ? dtrain__max(p->init_count - first - at, 0) : some;
        for (int64_t i = left; i < some; i++) staging[i] = 0;
        DTRAIN__TRY(dtrain_device_copy(device, value + at, staging, (size_t)some * sizeof(float)));
    }
    return DTRAIN_OK;
}

/* Hash the bits of a parameter's value. A step of the hash takes eight bytes and is a bijection, so
 * one changed word always changes the result; the shift brings the upper half down, where a product
 * alone would never carry it. */
DTRAIN__PRIVATE dtrain_result dtrain__hash_param(dtrain_device *device, const dtrain_param *p,
                                                 uint64_t *hash)
{
    float staging[DTRAIN__STAGING_COUNT];
    *hash = DTRAIN__FNV_BASIS;
    for (int64_t at = 0; at < p->count; at += DTRAIN__STAGING_COUNT) {
        const int64_t count = dtrain__min(DTRAIN__STAGING_COUNT, p->count - at);
        DTRAIN__TRY(
            dtrain_device_copy(device, staging, p->value + at, (size_t)count * sizeof(float)));
        for (int64_t i = 0; i < count; i += 2) {
            uint64_t word = 0;
            memcpy(&word, staging + i, (size_t)dtrain__min(2, count - i) * sizeof(float));
            *hash = (*hash ^ word) * 0x9e3779b97f4a7c15u;
            *hash ^= *hash >> 32;
        }
    }
    return DTRAIN_OK;
}
