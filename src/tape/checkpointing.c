/* Activation checkpointing
 *
 * In a unit that drops results these do not go to the data arena but to one of two regions, which
 * such units use in turn; each kernel call is noted. Units 1 to 4, in regions A and B:
 *
 *     forward      1 -> A     2 -> B     3 -> A     4 -> B
 *     backward     4 is in B, 3 is in A     2 again -> B     1 again -> A
 *
 * When backward enters a unit that has been overwritten, its calls run again in their order: the
 * same kernels on the same addresses and the same random streams, so the same bits, and no pointer
 * anywhere has to change. Calls whose results nobody will read are left out: the last product of a
 * transformer block, a third of its multiplications, is read by the next block only.
 *
 * That copy is made when an operation of a later unit takes the tensor. Its own unit is still
 * intact then, for the one that follows writes to the other region; and from there on tensor->data
 * is the copy, in the data arena, for everyone. The calls of its own unit keep their address. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "device/backend.h"

static void dtrain__segments_forget(dtrain_tape *tape)
{
    tape->every = tape->checkpoint_every;
    tape->dropped_ops = tape->checkpoint_ops;
    tape->mark_count = tape->segment_count = 0;
    tape->recomputed_count = 0;
    tape->segment = NULL;
    tape->regions[0].owner = tape->regions[1].owner = NULL;
}

static void dtrain__region_take(dtrain_tape *tape, dtrain__tape_segment *segment)
{
    dtrain__tape_region *region = &tape->regions[segment->region];
    if (region->owner && !region->owner->successor) region->owner->successor = segment;
    region->owner = segment;
}

/* After a mark: what follows is a segment, if this unit drops results. */
static void dtrain__segment_begin(dtrain_tape *tape)
{
    const uint32_t every = tape->every, mark = tape->mark_count++;
    tape->segment = NULL;
    if (tape->error != DTRAIN_OK || every == 0 || mark % every != every - 1) return;
    dtrain__tape_segment *segment =
        (dtrain__tape_segment *)dtrain__take_host(tape, sizeof *segment);
    if (!segment) return;
    segment->unit = tape->unit;
    segment->region = tape->segment_count++ % 2;
    dtrain__region_take(tape, segment);
    dtrain__bump_rewind(&tape->regions[segment->region].memory);
    tape->segment = segment;
}

DTRAIN__PRIVATE dtrain_result dtrain__check_intact(const dtrain_tensor *x, const char *call)
{
    const dtrain__tape_tensor *made = (const dtrain__tape_tensor *)x;
    if (!made->segment || made->kept || !made->segment->successor) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_USAGE,
        "%s: a tensor made in unit %lld is needed after unit %lld has overwritten it: activation "
        "checkpointing keeps it until then only; use it in the unit that follows its own (a "
        "dtrain_scale by 1 hands it on), or drop less with dtrain_tape_checkpoint",
        call, (long long)made->segment->unit, (long long)made->segment->successor->unit);
}

/* Before a use outside of the segment that is recorded now: x->data is there until the next begin.
 */
DTRAIN__PRIVATE dtrain_result dtrain__tensor_keep(dtrain_tape *tape, dtrain_tensor *x,
                                                  const char *call)
{
    dtrain__tape_tensor *made = (dtrain__tape_tensor *)x;
    if (!made->segment || made->kept || made->segment == tape->segment) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__check_intact(x, call));
    void *copy = dtrain__take_data(tape, NULL, x->count, x->dtype);
    if (!copy) return tape->error;
    DTRAIN__TRY(tape->device->ops->copy(tape->device, copy, x->data, dtrain__tensor_bytes(x),
                                        DTRAIN_COPY_DEVICE_TO_DEVICE));
    x->data = copy;
    made->kept = true;
    return DTRAIN_OK;
}

/* Runs a kernel of the node, and notes the call if its results are dropped. */
DTRAIN__PRIVATE dtrain_result dtrain__run_kernel(dtrain_tape *tape, const dtrain_node *node,
                                                 dtrain__kernel_fn kernel, const void *args,
                                                 size_t args_bytes)
{
    if (node->dropped && !(tape->flags & DTRAIN_TAPE_NO_GRAD)) {
        dtrain__call *call = (dtrain__call *)dtrain__take_host(tape, sizeof *call);
        void *copy = dtrain__take_host(tape, args_bytes);
        if (!call || !copy) return tape->error;
        memcpy(copy, args, args_bytes);
        call->kernel = kernel;
        call->args = copy;
        call->node = node;
        call->next = node->segment->calls;
        node->segment->calls = call;
    }
    return kernel(tape->device, args);
}

/* The value of x will be read at the address at which the segment made it. */
static void dtrain__want(const dtrain__tape_segment *segment, dtrain_tensor *x)
{
    dtrain__tape_tensor *made = (dtrain__tape_tensor *)x;
    if (x && made->segment == segment) made->wanted = true;
}

static bool dtrain__is_wanted(const dtrain_tensor *x)
{
    return ((const dtrain__tape_tensor *)x)->wanted;
}

/* What the backward functions of the segment will read; node is the last that has one to run. */
static void dtrain__want_backward(const dtrain__tape_segment *segment, const dtrain_node *node)
{
    for (; node && node->segment == segment; node = node->previous) {
        if (!node->reached) continue;
        if (node->reads_input) dtrain__want(segment, node->in[0]);
        if (node->reads_output) dtrain__want(segment, node->out);
    }
}

/* Makes the segment's values again as far as backward needs them, if they are gone. */
DTRAIN__PRIVATE dtrain_result dtrain__segment_again(dtrain_tape *tape, const dtrain_node *node)
{
    dtrain__tape_segment *segment = node->segment;
    dtrain__call *call, *before, *first = NULL;
    if (!segment || !segment->successor) return DTRAIN_OK;
    if (tape->regions[segment->region].owner == segment) return DTRAIN_OK; /* done already */
    dtrain__region_take(tape, segment);
    dtrain__want_backward(segment, node);
    for (call = segment->calls; call; call = before) {
        const dtrain_node *made_by = call->node, *sum = made_by->sum;
        before = call->next;
        if (!(made_by->reached && made_by->reads_rest) && !dtrain__is_wanted(made_by->out) &&
            !(sum && dtrain__is_wanted(sum->out)))
            continue;
        for (int i = 0; i < 2; i++) {
            dtrain__want(segment, made_by->in[i]);
            if (sum) dtrain__want(segment, sum->in[i]);
        }
        call->next = first;
        first = call;
    }
    for (call = first; call; call = call->next, tape->recomputed_count++)
        DTRAIN__TRY(call->kernel(tape->device, call->args));
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_tape_checkpoint(dtrain_tape *tape, uint32_t every, uint32_t ops)
{
    const char *const call = "dtrain_tape_checkpoint";
    if (!tape) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: tape is NULL", call);
    if (ops & ~DTRAIN_CHECKPOINT_ALL)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: unknown operations %#x", call, ops);
    tape->checkpoint_every = every;
    tape->checkpoint_ops = ops ? ops : DTRAIN_CHECKPOINT_ALL;
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
