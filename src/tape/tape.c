/* Tape and tensors
 *
 * A pass from begin to backward: inputs and unit marks are here, operations in tape/op.c, the walk
 * back in tape/backward.c. What a pass leaves behind, and for how long, is in tape_internal.h. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "strategy/strategy.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "device/backend.h"
#include "device/device.h"

static dtrain_result dtrain__flags_check(uint32_t flags);
static dtrain_result dtrain__input_check(dtrain_dtype dtype, uint32_t ndim, const int64_t *shape,
                                         const void *host, bool requires_grad);
static dtrain_result dtrain__feed_take(dtrain_tape *tape, const dtrain_tensor *x,
                                       const void **host);
static dtrain_result dtrain__read_check(dtrain_tape *tape, const dtrain_tensor *tensor,
                                        const float *host, const char *call);

DTRAIN_API dtrain_result dtrain_tape_create(dtrain_world *world, dtrain_strategy *strategy,
                                            dtrain_device *device, dtrain_tape **out)
{
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_create: out is NULL");
    *out = NULL;
    if (!world && !device)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_create: world and device are both "
                                                  "NULL; a tape needs a device to run on");
    dtrain_allocator allocator = dtrain__resolve_allocator(world ? &world->allocator : NULL);
    dtrain_tape *tape = (dtrain_tape *)dtrain__alloc(&allocator, 1, sizeof *tape, "a tape");
    if (!tape) return DTRAIN_ERROR_MEMORY;
    tape->allocator = allocator;
    tape->strategy = strategy;
    tape->device = device ? device : dtrain_world_device(world);
    tape->planning = tape->device->ops == dtrain_plan_device_ops();
    tape->data.device = tape->device;
    for (int i = 0; i < 2; i++) tape->regions[i].memory.device = tape->device;
    tape->unit = -1;
    *out = tape;
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_tape_destroy(dtrain_tape *tape)
{
    if (!tape) return;
    dtrain__chunks_destroy(tape, tape->device, tape->data.first);
    for (int i = 0; i < 2; i++)
        dtrain__chunks_destroy(tape, tape->device, tape->regions[i].memory.first);
    dtrain__chunks_destroy(tape, tape->device, tape->gradients);
    dtrain__chunks_destroy(tape, NULL, tape->host.first);
    dtrain_allocator allocator = tape->allocator;
    dtrain__free(&allocator, tape, 1, sizeof *tape);
}

/* ---- A pass -----------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_tape_begin(dtrain_tape *tape, uint32_t flags, uint64_t seed)
{
    if (!tape) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_begin: tape is NULL");
    tape->error = DTRAIN_OK;
    dtrain__bump_rewind(&tape->host);
    dtrain__bump_rewind(&tape->data);
    dtrain__segments_forget(tape);
    for (dtrain__chunk *chunk = tape->gradients; chunk; chunk = chunk->next) chunk->owners = 0;
    tape->last = NULL;
    tape->node_count = tape->tensor_count = 0;
    tape->flags = flags;
    tape->seed = seed;
    tape->dropout_count = 0;
    tape->state = DTRAIN__TAPE_FORWARD;
    tape->cast = flags & DTRAIN_TAPE_BF16  ? DTRAIN_DTYPE_BF16
                 : flags & DTRAIN_TAPE_F16 ? DTRAIN_DTYPE_F16
                                           : DTRAIN_DTYPE_F32;
    tape->casts = NULL;
    dtrain_result result = dtrain__flags_check(flags);
    return dtrain__tape_stick(tape, result ? result : dtrain__tape_enter(tape, -1));
}

static dtrain_result dtrain__flags_check(uint32_t flags)
{
    const uint32_t low = DTRAIN_TAPE_BF16 | DTRAIN_TAPE_F16;
    if (flags & ~(DTRAIN_TAPE_NO_GRAD | low))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_begin: unknown flags %#x", flags);
    if ((flags & low) == low)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_tape_begin: flags %#x ask for autocast to bf16 and to f16; a "
                           "pass has one of them",
                           flags);
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_tape_unit(dtrain_tape *tape, uint32_t unit)
{
    if (!tape || tape->error != DTRAIN_OK) return;
    if (tape->state != DTRAIN__TAPE_FORWARD)
        dtrain__tape_fail(tape, DTRAIN_ERROR_USAGE,
                          "dtrain_tape_unit: no pass is under way; call dtrain_tape_begin first");
    else if (unit != tape->unit) {
        dtrain__tape_stick(tape, dtrain__tape_enter(tape, unit));
        dtrain__segment_begin(tape);
    }
}

/* Lets go of the unit that is gathered and gathers another; -1 = none. Releasing comes first: two
 * whole units at once would double what a sharded strategy keeps in memory. */
DTRAIN__PRIVATE dtrain_result dtrain__tape_enter(dtrain_tape *tape, int64_t unit)
{
    int64_t before = tape->unit;
    if (unit == before) return DTRAIN_OK;
    tape->unit = unit;
    if (tape->planning || !tape->strategy) return DTRAIN_OK;
    if (before >= 0) DTRAIN__TRY(dtrain_strategy_release(tape->strategy, (uint32_t)before));
    return unit >= 0 ? dtrain_strategy_gather(tape->strategy, (uint32_t)unit) : DTRAIN_OK;
}

/* Why no tensor can be made now, as an error that sticks; DTRAIN_OK if it can. */
DTRAIN__PRIVATE dtrain_result dtrain__tape_check(dtrain_tape *tape, const char *call)
{
    if (!tape) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: tape is NULL", call);
    if (tape->error != DTRAIN_OK) return tape->error;
    if (tape->state == DTRAIN__TAPE_FORWARD) return DTRAIN_OK;
    const char *why = tape->state == DTRAIN__TAPE_IDLE ? "no pass is under way"
                                                       : "this pass has had its backward";
    dtrain__tape_fail(tape, DTRAIN_ERROR_USAGE, "%s: %s; call dtrain_tape_begin first", call, why);
    return tape->error;
}

/* ---- Inputs -----------------------------------------------------------------------------------*/

DTRAIN_API dtrain_tensor *dtrain_tape_input(dtrain_tape *tape, dtrain_dtype dtype, uint32_t ndim,
                                            const int64_t *shape, const void *host,
                                            bool requires_grad)
{
    if (dtrain__tape_check(tape, "dtrain_tape_input") != DTRAIN_OK) return NULL;
    if (dtrain__tape_stick(tape, dtrain__input_check(dtype, ndim, shape, host, requires_grad)))
        return NULL;
    dtrain_tensor *x = dtrain__tensor_new(tape, NULL, dtype, ndim, shape);
    if (!x) return NULL;
    x->needs_grad = requires_grad && !(tape->flags & DTRAIN_TAPE_NO_GRAD);
    const size_t bytes = (size_t)x->count * 4;
    dtrain_result result;
    if (tape->feed) result = dtrain__feed_take(tape, x, &host);
    else
        result =
            tape->device->ops->copy(tape->device, x->data, host, bytes, DTRAIN_COPY_HOST_TO_DEVICE);
    /* counted here because only here are they in host memory */
    if (dtype == DTRAIN_DTYPE_I32 && result == DTRAIN_OK)
        ((dtrain__tape_tensor *)x)->valid_count = dtrain__count_valid(host, x->count);
    return dtrain__tape_stick(tape, result) == DTRAIN_OK ? x : NULL;
}

static dtrain_result dtrain__input_check(dtrain_dtype dtype, uint32_t ndim, const int64_t *shape,
                                         const void *host, bool requires_grad)
{
    const char *const call = "dtrain_tape_input";
    if (dtype != DTRAIN_DTYPE_F32 && dtype != DTRAIN_DTYPE_I32)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: dtype is %s, not f32 or i32", call,
                           dtrain_dtype_name(dtype));
    if (dtype == DTRAIN_DTYPE_I32 && requires_grad)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: i32 has no gradient", call);
    if (!shape || !host)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s is NULL", call, shape ? "host" : "shape");
    if (ndim < 1 || ndim > 4)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %u axes, not 1 to 4", call, ndim);
    for (uint32_t i = 0; i < ndim; i++)
        if (shape[i] < 1)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: axis %u has length %lld", call, i,
                               (long long)shape[i]);
    return DTRAIN_OK;
}

DTRAIN__PRIVATE int64_t dtrain__count_valid(const void *host, int64_t count)
{
    const int32_t *entries = (const int32_t *)host;
    int64_t valid = 0;
    for (int64_t i = 0; i < count; i++) valid += entries[i] != -1;
    return valid;
}

/* The caller's data goes to the input's page-locked place, if it is not there yet, and from there
 * to the device when the stream comes to it. *host becomes that place. */
static dtrain_result dtrain__feed_take(dtrain_tape *tape, const dtrain_tensor *x, const void **host)
{
    dtrain__feed *feed = tape->feed;
    dtrain__feed_item *item = &feed->items[feed->next];
    const size_t bytes = (size_t)x->count * 4;
    if (feed->next == DTRAIN__FEED_ITEMS)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_tape_input: a pass that is replayed has at most %d inputs",
                           DTRAIN__FEED_ITEMS);
    if (feed->next == feed->count) {
        DTRAIN__TRY(tape->device->ops->host_alloc(tape->device, bytes, &item->pinned));
        item->bytes = bytes;
        item->dtype = (dtrain_dtype)x->dtype;
        feed->count++;
    } else if (item->bytes != bytes || item->dtype != (dtrain_dtype)x->dtype) {
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_tape_input: input %zu has %zu bytes and had %zu in an earlier "
                           "step; a step that is replayed must repeat its shapes",
                           feed->next + 1, bytes, item->bytes);
    }
    if (!feed->filled) memcpy(item->pinned, *host, bytes);
    item->host = *host;
    if (item->dtype == DTRAIN_DTYPE_I32)
        item->valid_count = dtrain__count_valid(item->pinned, x->count);
    *host = item->pinned;
    feed->next++;
    return tape->device->ops->copy_async(tape->device, x->data, item->pinned, bytes,
                                         DTRAIN_COPY_HOST_TO_DEVICE, NULL);
}

/* ---- Reading ----------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_tensor_read(dtrain_tape *tape, const dtrain_tensor *tensor,
                                            float *host)
{
    const char *const call = "dtrain_tensor_read";
    DTRAIN__TRY(dtrain__read_check(tape, tensor, host, call));
    DTRAIN__TRY(dtrain__check_intact(tensor, call));
    DTRAIN__TRY(tape->device->ops->copy(tape->device, host, tensor->data,
                                        dtrain__tensor_bytes(tensor), DTRAIN_COPY_DEVICE_TO_HOST));
    if (tensor->dtype == DTRAIN_DTYPE_F32) return DTRAIN_OK;
    for (int64_t i = tensor->count - 1; i >= 0; i--) { /* in place, from the end */
        uint16_t bits;
        memcpy(&bits, (const char *)host + (size_t)i * sizeof bits, sizeof bits);
        host[i] =
            tensor->dtype == DTRAIN_DTYPE_BF16 ? dtrain_bf16_to_f32(bits) : dtrain_f16_to_f32(bits);
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_tensor_read_grad(dtrain_tape *tape, const dtrain_tensor *tensor,
                                                 float *host)
{
    DTRAIN__TRY(dtrain__read_check(tape, tensor, host, "dtrain_tensor_read_grad"));
    if (tensor->producer || !tensor->needs_grad)
        return dtrain_fail(DTRAIN_ERROR_USAGE, "dtrain_tensor_read_grad: only inputs made with "
                                               "requires_grad keep their gradient");
    if (tape->state != DTRAIN__TAPE_DONE)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_tensor_read_grad: dtrain_tape_backward has not run");
    size_t bytes = (size_t)tensor->count * sizeof(float);
    if (!tensor->grad) { /* the loss does not depend on it */
        memset(host, 0, bytes);
        return DTRAIN_OK;
    }
    return tape->device->ops->copy(tape->device, host, tensor->grad, bytes,
                                   DTRAIN_COPY_DEVICE_TO_HOST);
}

static dtrain_result dtrain__read_check(dtrain_tape *tape, const dtrain_tensor *tensor,
                                        const float *host, const char *call)
{
    if (!tape) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: tape is NULL", call);
    DTRAIN__TRY(dtrain_tape_error(tape)); /* the likely reason why tensor is NULL */
    if (!tensor || !host)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s is NULL", call,
                           tensor ? "host" : "tensor");
    if (!dtrain__is_float(tensor))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: the tensor is %s, not f32", call,
                           dtrain_dtype_name((dtrain_dtype)tensor->dtype));
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_tape_query(const dtrain_tape *tape, dtrain_tape_info *info)
{
    memset(info, 0, sizeof *info);
    if (!tape) return;
    info->node_count = tape->node_count;
    info->tensor_count = tape->tensor_count;
    info->recomputed_count = tape->recomputed_count;
    info->activation_bytes = tape->activation_bytes;
    info->gradient_bytes = tape->gradient_bytes;
    info->block_allocations = tape->allocation_count;
}

DTRAIN__PRIVATE bool dtrain__is_float(const dtrain_tensor *x)
{
    return x->dtype == DTRAIN_DTYPE_F32 || x->dtype == DTRAIN_DTYPE_BF16 ||
           x->dtype == DTRAIN_DTYPE_F16;
}

DTRAIN__PRIVATE size_t dtrain__tensor_bytes(const dtrain_tensor *x)
{
    return (size_t)x->count * dtrain_dtype_bytes((dtrain_dtype)x->dtype);
}

/* ---- Errors
 *
 * The sentence is kept with the code: by the time somebody asks, other calls on this thread may
 * have left theirs in the thread's last error. */

DTRAIN__PRIVATE dtrain_result dtrain__tape_stick(dtrain_tape *tape, dtrain_result result)
{
    if (result != DTRAIN_OK && tape->error == DTRAIN_OK) {
        tape->error = result;
        memcpy(tape->error_text, dtrain_last_error(), sizeof tape->error_text);
    }
    return result;
}

/* A new error that sticks. Always NULL: an operation ends by returning it. */
DTRAIN__PRINTF(3, 4)
DTRAIN__PRIVATE dtrain_tensor *dtrain__tape_fail(dtrain_tape *tape, dtrain_result code,
                                                 const char *format, ...)
{
    char text[DTRAIN__ERROR_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    dtrain__tape_stick(tape, dtrain_fail(code, "%s", text));
    return NULL;
}

DTRAIN_API dtrain_result dtrain_tape_error(const dtrain_tape *tape)
{
    if (!tape) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_error: tape is NULL");
    if (tape->error != DTRAIN_OK) dtrain__set_last_error(tape->error_text);
    return tape->error;
}
