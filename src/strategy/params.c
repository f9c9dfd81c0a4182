/* Parameters: check and complete what the host registers
 *
 * layout.c makes two tables of the parameters: entries, and buckets of gradients that travel
 * together.
 *
 *     params    0 wte    1 w1     2 b1     3 head          registration = forward order
 *     storage   0        1        2        0               head is an alias of wte
 *
 *     gradient region, one allocation, cut in buckets in launch order:
 *         | b1 ... pad | w1 ........ pad |  | wte .................... pad |
 *         |<---- bucket 0 (capped) ----->|  |<---------- bucket 1 -------->|
 *
 * Gradients become final in reverse forward order, so buckets are filled from the last parameter to
 * the first. A tied gradient is final when backward has come to its first entry, the storage; its
 * place in the order is there. Every gradient starts on a cache line. Padding is zero and stays
 * zero under the mean, so it changes no bits. */

#include "core/platform_internal.h"
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
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_strategy_create: parameter %zu (\"%s\"): %s",
                       index, dtrain__short(p->name), text);
}

DTRAIN__PRIVATE int64_t dtrain__whole_count(const dtrain_param *p)
{
    int64_t count = p->shape[0] ? 1 : p->count;
    for (int d = 0; d < 4 && p->shape[d]; d++) count *= p->shape[d];
    return count;
}

DTRAIN__PRIVATE dtrain__share dtrain__share_here(const dtrain_param *p,
                                                 const dtrain__groups *groups)
{
    dtrain__share part;
    dtrain__share_of(&p->cut, p->shape, groups->tensor_ranks, groups->tensor_rank, &part);
    return part;
}

/* Complete count from shape or shape from count, and check that they agree. A cut parameter must
 * have a shape, and gets the count of this rank's part. */
static dtrain_result dtrain__resolve_shape(dtrain_param *p, size_t index,
                                           const dtrain__groups *groups)
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
    if (p->cut.axis && !dims && !p->alias_of)
        return dtrain__param_fail(p, index,
                                  "it has a cut, but its shape is zeros; give the shape of the "
                                  "whole, of which count becomes this rank's part");
    if (dims == 0) p->shape[0] = p->count;
    if (dtrain__cut_check(&p->cut, p->shape, groups->tensor_ranks) != DTRAIN_OK)
        return dtrain__param_fail(p, index, "%s", dtrain__bare(dtrain_last_error()));
    if (p->cut.axis && dims) p->count = dtrain__share_here(p, groups).count;
    else if (p->count == 0) p->count = (int64_t)product;
    if (p->cut.axis || (size_t)p->count == product) return DTRAIN_OK;
    return dtrain__param_fail(p, index, "count is %lld, its shape has %zu elements",
                              (long long)p->count, product);
}

/* Return the type of sums, shards and masters. All parameters are fp64, or none. */
DTRAIN__PRIVATE uint32_t dtrain__sums_dtype(const dtrain_param *params, size_t count)
{
    return count && params[0].dtype == DTRAIN_DTYPE_F64 ? DTRAIN_DTYPE_F64 : DTRAIN_DTYPE_F32;
}

/* Check a parameter's type, and that the host's arrays have it. */
static dtrain_result dtrain__check_dtype(const dtrain_param *p, size_t index)
{
    const char *const name = dtrain_dtype_name((dtrain_dtype)p->dtype);
    if (p->dtype > DTRAIN_DTYPE_F16 && p->dtype != DTRAIN_DTYPE_F64)
        return dtrain__param_fail(p, index, "dtype is %u (%s), expected F32, BF16, F16 or F64",
                                  (unsigned)p->dtype, name);
    if (p->dtype == DTRAIN_DTYPE_F32 ? p->typed_value || p->typed_grad : p->value || p->grad)
        return dtrain__param_fail(p, index,
                                  "its dtype is %s, with which the host's arrays are %s; leave the "
                                  "other two NULL",
                                  name, p->dtype ? "typed_value and typed_grad" : "value and grad");
    if (p->dtype == DTRAIN_DTYPE_F32 || !(p->flags & DTRAIN_PARAM_BUFFER)) return DTRAIN_OK;
    return dtrain__param_fail(p, index,
                              "it is a buffer, which ranks average in fp32, and its dtype is %s; "
                              "leave dtype 0",
                              name);
}

/* Find the storage of an alias. Its target is an earlier entry with a known storage, so one pass
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
    if (storage->cut.axis || p->cut.axis) {
        if (memcmp(p->shape, storage->shape, sizeof p->shape) ||
            (p->cut.axis && memcmp(&p->cut, &storage->cut, sizeof p->cut)))
            return dtrain__param_fail(p, index,
                                      "an alias of \"%s\", which has a cut, has the same shape "
                                      "and the same cut, or zeros",
                                      dtrain__short(storage->name));
        p->cut = storage->cut;
        p->count = storage->count;
    }
    if (p->count != storage->count)
        return dtrain__param_fail(
            p, index, "it has %lld elements, \"%s\" that it is an alias of has %lld",
            (long long)p->count, dtrain__short(storage->name), (long long)storage->count);
    if (p->dtype && p->dtype != storage->dtype)
        return dtrain__param_fail(
            p, index, "its dtype is %s, \"%s\" that it is an alias of has %s; leave it 0",
            dtrain_dtype_name((dtrain_dtype)p->dtype), dtrain__short(storage->name),
            dtrain_dtype_name((dtrain_dtype)storage->dtype));
    p->dtype = storage->dtype;
    if ((p->value && p->value != storage->value) || (p->grad && p->grad != storage->grad) ||
        (p->typed_value && p->typed_value != storage->typed_value) ||
        (p->typed_grad && p->typed_grad != storage->typed_grad))
        return dtrain__param_fail(p, index,
                                  "an alias shares value and grad of its target: leave its "
                                  "own pointers NULL");
    if (p->group && p->group != storage->group)
        return dtrain__param_fail(p, index,
                                  "its group is %u, that of \"%s\" that it is an alias of %u: "
                                  "they are one parameter; leave it 0",
                                  p->group, dtrain__short(storage->name), storage->group);
    p->state.storage = storage;
    p->state.next = storage->state.next;
    storage->state.next = p;
    return DTRAIN_OK;
}

/* Set grad_written of a storage and of all its aliases: a host reads it in the entry that it is
 * computing. Without a strategy `next` is NULL. */
DTRAIN__PRIVATE void dtrain__set_grad_written(dtrain_param *storage, bool written)
{
    dtrain_param *p = storage;
    do {
        p->state.grad_written = written;
        p = p->state.next;
    } while (p && p != storage);
}

/* Check the array and fill in its shapes, counts and states. Compare each name with every other,
 * once: that takes some milliseconds for a thousand parameters. */
DTRAIN__PRIVATE dtrain_result dtrain__resolve_params(dtrain_param *params, size_t count,
                                                     const dtrain__groups *groups)
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
        DTRAIN__TRY(dtrain__check_dtype(p, i));
        DTRAIN__TRY(dtrain__resolve_shape(p, i, groups));
        const int64_t whole = dtrain__whole_count(p);
        if (p->init_count < 0 || p->init_count > whole)
            return dtrain__param_fail(p, i, "init_count is %lld, of %lld elements",
                                      (long long)p->init_count, (long long)whole);
        memset(&p->state, 0, sizeof p->state);
        p->state.storage = p->state.next = p;
        p->state.index = (uint32_t)i;
        p->state.frozen = (p->flags & DTRAIN_PARAM_FROZEN) != 0;
        if (p->alias_of) DTRAIN__TRY(dtrain__resolve_alias(params, i));
        if ((p->dtype == DTRAIN_DTYPE_F64) != (params[0].dtype == DTRAIN_DTYPE_F64))
            return dtrain__param_fail(p, i,
                                      "its dtype is %s, that of \"%s\" %s: all parameters of a "
                                      "strategy are fp64, or none",
                                      dtrain_dtype_name((dtrain_dtype)p->dtype),
                                      dtrain__short(params[0].name),
                                      dtrain_dtype_name((dtrain_dtype)params[0].dtype));
        const size_t each = p->dtype == DTRAIN_DTYPE_F64 ? sizeof(double) : sizeof(float);
        const size_t bytes = dtrain__round_up((size_t)p->count * each, DTRAIN__CACHE_LINE);
        if (!dtrain__size_add(total, bytes, &total) || total > SIZE_MAX / 4)
            return dtrain__param_fail(p, i, "with it the model is larger than memory can hold");
    }
    return DTRAIN_OK;
}

/* ---- Values -----------------------------------------------------------------------------------*/

/* Initialise value (count; host or device memory) as elements [first, first + count) of a part of
 * parameter p; part NULL: of the whole. An element is a function of (seed, parameter, place in the
 * whole) only: it is the same on every rank, however values are cut and sharded. */
DTRAIN__PRIVATE dtrain_result dtrain__init_param(dtrain_device *device, const dtrain_param *p,
                                                 const dtrain__share *part, uint64_t seed,
                                                 int64_t first, int64_t count, void *value)
{
    const bool wide = p->dtype == DTRAIN_DTYPE_F64;
    const size_t each = wide ? sizeof(double) : sizeof(float);
    const bool drawn = p->init == DTRAIN_INIT_NORMAL || p->init == DTRAIN_INIT_UNIFORM;
    const size_t bytes = (size_t)count * each;
    float staging[DTRAIN__STAGING_COUNT];
    double wider[DTRAIN__STAGING_COUNT];
    if (p->init == DTRAIN_INIT_ZERO && count > 0) {
        if (!dtrain__on_host(device, value)) return device->ops->zero(device, value, bytes);
        memset(value, 0, bytes);
        return DTRAIN_OK;
    }
    for (int64_t at = 0, filled = 0; at < count; at += filled, filled = 0) {
        const int64_t some = dtrain__min(DTRAIN__STAGING_COUNT, count - at);
        while (filled < some) { /* runs that are consecutive in the whole */
            int64_t run = some, from = first + at + filled;
            if (part) from = dtrain__share_place(part, from, &run);
            run = dtrain__min(run, some - filled);
            if (drawn)
                dtrain__random_fill(seed, p->state.index, (uint64_t)from, run,
                                    p->init == DTRAIN_INIT_NORMAL, p->init_scale, staging + filled);
            for (int64_t i = 0; i < run; i++) {
                if (!drawn) staging[filled + i] = p->init_scale;
                if (p->init_count && from + i >= p->init_count) staging[filled + i] = 0;
            }
            filled += run;
        }
        for (int64_t i = 0; i < some && wide; i++) wider[i] = (double)staging[i];
        DTRAIN__TRY(dtrain_device_copy(device, (char *)value + (size_t)at * each,
                                       wide ? (const void *)wider : staging, (size_t)some * each));
    }
    return DTRAIN_OK;
}
