/* Values of parameters. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "strategy/layout_internal.h"
#include "device/backend.h"
#include "device/device_internal.h"

/* Elements [first, first + count) of parameter p, each a function of (seed, parameter,
 * element) only: the same on every rank, for any slicing. */
static void dtrain__init_block(const dtrain_param *p, uint64_t seed, int64_t first, int64_t count,
                               float *out)
{
    const float scale = p->init_scale;
    switch (p->init) {
    case DTRAIN_INIT_NORMAL:
        dtrain__random_normal_fill(seed, p->state.index, (uint64_t)first, count, scale, out);
        break;
    case DTRAIN_INIT_UNIFORM:
        dtrain__random_uniform_fill(seed, p->state.index, (uint64_t)first, count, -scale, 2 * scale,
                                    out);
        break;
    default:
        for (int64_t i = 0; i < count; i++) out[i] = p->init == DTRAIN_INIT_CONSTANT ? scale : 0.0f;
        break;
    }
}

#define DTRAIN__STAGING_COUNT 4096 /* elements; on the stack, so that nothing can fail */

/* value (count) = elements [first, first + count) of parameter p. */
DTRAIN__PRIVATE dtrain_result dtrain__init_param(dtrain_device *device, const dtrain_param *p,
                                                 uint64_t seed, int64_t first, int64_t count,
                                                 float *value)
{
    float staging[DTRAIN__STAGING_COUNT];
    if (dtrain__on_host(device, value)) {
        dtrain__init_block(p, seed, first, count, value);
        return DTRAIN_OK;
    }
    if (p->init == DTRAIN_INIT_ZERO)
        return device->ops->zero(device, value, (size_t)count * sizeof(float));
    for (int64_t at = 0; at < count; at += DTRAIN__STAGING_COUNT) {
        const int64_t some = dtrain__min(DTRAIN__STAGING_COUNT, count - at);
        dtrain__init_block(p, seed, first + at, some, staging);
        DTRAIN__TRY(device->ops->copy(device, value + at, staging, (size_t)some * sizeof(float),
                                      DTRAIN_COPY_HOST_TO_DEVICE));
    }
    return DTRAIN_OK;
}

/* A step of the hash takes eight bytes and is a bijection, so one changed word always changes the
 * result; the shift brings the upper half down, where a product alone would never carry it. */
static uint64_t dtrain__hash_floats(uint64_t hash, const float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i += 2) {
        uint64_t word = 0;
        memcpy(&word, x + i, (size_t)dtrain__min(2, count - i) * sizeof(float));
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return hash;
}

DTRAIN__PRIVATE dtrain_result dtrain__hash_param(dtrain_device *device, const dtrain_param *p,
                                                 uint64_t *hash)
{
    const dtrain_device_ops *ops = device->ops;
    float staging[DTRAIN__STAGING_COUNT];
    *hash = DTRAIN__FNV_BASIS;
    if (dtrain__on_host(device, p->value)) {
        *hash = dtrain__hash_floats(*hash, p->value, p->count);
        return DTRAIN_OK;
    }
    for (int64_t at = 0; at < p->count; at += DTRAIN__STAGING_COUNT) {
        const int64_t count = dtrain__min(DTRAIN__STAGING_COUNT, p->count - at);
        DTRAIN__TRY(ops->copy(device, staging, p->value + at, (size_t)count * sizeof(float),
                              DTRAIN_COPY_DEVICE_TO_HOST));
        *hash = dtrain__hash_floats(*hash, staging, count);
    }
    return DTRAIN_OK;
}
