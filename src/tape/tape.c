/* Gradients of tensors
 *
 * The first contribution overwrites, later ones add. An operation that only hands its gradient on
 * (add) makes the buffer shared instead of copying it; who wants to write into a shared buffer
 * makes a copy first. In a residual network
 *
 *     y = add(x, f(x)):   d y becomes d x and d f(x) at no cost; f's backward reads it and lets go,
 *                         and by the time it adds its own share to d x that is the only owner */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "strategy/params.h"
#include "strategy/strategy.h"
#include "strategy/strategy_internal.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "device/backend.h"
#include "device/device.h"

DTRAIN__PRIVATE size_t dtrain__tensor_bytes(const dtrain_tensor *x)
{
    return (size_t)x->count * dtrain_dtype_bytes((dtrain_dtype)x->dtype);
}

static dtrain__chunk *dtrain__gradient_take(dtrain_tape *tape, const dtrain_tensor *x)
{
    size_t bytes = dtrain__round_up(dtrain__tensor_bytes(x), DTRAIN__CACHE_LINE);
    dtrain__chunk *chunk = tape->gradients;
    while (chunk && (chunk->owners || chunk->bytes != bytes)) chunk = chunk->next;
    if (!chunk) {
        chunk = dtrain__chunk_create(tape, tape->device, bytes);
        if (!chunk) return NULL;
        chunk->next = tape->gradients;
        tape->gradients = chunk;
        tape->gradient_bytes += bytes;
    }
    chunk->owners = 1;
    return chunk;
}

DTRAIN__PRIVATE void dtrain__gradient_set(dtrain_tensor *x, dtrain__chunk *chunk)
{
    ((dtrain__tape_tensor *)x)->gradient = chunk;
    x->grad = chunk ? chunk->memory : NULL;
    x->grad_written = chunk != NULL;
}

DTRAIN__PRIVATE void dtrain__gradient_drop(dtrain_tensor *x)
{
    dtrain__chunk *chunk = ((dtrain__tape_tensor *)x)->gradient;
    if (chunk) chunk->owners--;
    dtrain__gradient_set(x, NULL);
}

/* Makes x the only owner of its gradient, so that it can be written in place. */
DTRAIN__PRIVATE dtrain_result dtrain__gradient_own(dtrain_tape *tape, dtrain_tensor *x)
{
    dtrain__chunk *shared = ((dtrain__tape_tensor *)x)->gradient, *own;
    if (shared->owners == 1) return DTRAIN_OK;
    own = dtrain__gradient_take(tape, x);
    if (!own) return tape->error;
    shared->owners--;
    dtrain__gradient_set(x, own);
    return tape->device->ops->copy(tape->device, own->memory, shared->memory,
                                   dtrain__tensor_bytes(x), DTRAIN_COPY_DEVICE_TO_DEVICE);
}

/* x->grad is ready for one contribution; *accumulate tells the kernel whether to add. */
DTRAIN__PRIVATE dtrain_result dtrain__gradient_open(dtrain_tape *tape, dtrain_tensor *x,
                                                    bool *accumulate)
{
    *accumulate = x->grad_written;
    if (x->grad_written) return dtrain__gradient_own(tape, x);
    dtrain__gradient_set(x, dtrain__gradient_take(tape, x));
    return x->grad ? DTRAIN_OK : tape->error;
}

/* The same for kernels that can only overwrite: x->grad is a fresh buffer, and what x had is put
 * aside in *earlier; gradient_merge adds it when the kernel has run. */
DTRAIN__PRIVATE dtrain_result dtrain__gradient_fresh(dtrain_tape *tape, dtrain_tensor *x,
                                                     dtrain__chunk **earlier)
{
    bool accumulate;
    *earlier = ((dtrain__tape_tensor *)x)->gradient;
    dtrain__gradient_set(x, NULL);
    return dtrain__gradient_open(tape, x, &accumulate);
}

DTRAIN__PRIVATE dtrain_result dtrain__gradient_merge(dtrain_tape *tape, dtrain_tensor *x,
                                                     dtrain__chunk *earlier)
{
    if (!earlier) return DTRAIN_OK;
    const dtrain_dtype dtype = (dtrain_dtype)x->dtype;
    dtrain_add_args args = {x->count, x->grad, earlier->memory, x->grad, dtype, dtype};
    earlier->owners--;
    return tape->device->ops->add(tape->device, &args);
}

/* x's gradient += from's gradient, by sharing the buffer when x has none yet and the same type. */
DTRAIN__PRIVATE dtrain_result dtrain__gradient_pass(dtrain_tape *tape, const dtrain_tensor *from,
                                                    dtrain_tensor *x)
{
    const dtrain_dtype from_dtype = (dtrain_dtype)from->dtype, x_dtype = (dtrain_dtype)x->dtype;
    dtrain__chunk *chunk = ((const dtrain__tape_tensor *)from)->gradient;
    bool accumulate;
    if (!x->grad_written && from_dtype == x_dtype && !chunk->in_region) {
        chunk->owners++;
        dtrain__gradient_set(x, chunk);
        return DTRAIN_OK;
    }
    DTRAIN__TRY(dtrain__gradient_open(tape, x, &accumulate));
    if (!accumulate && from_dtype == x_dtype)
        return tape->device->ops->copy(tape->device, x->grad, from->grad, dtrain__tensor_bytes(x),
                                       DTRAIN_COPY_DEVICE_TO_DEVICE);
    if (!accumulate) {
        dtrain_convert_args convert = {x->count, from->grad, x->grad, from_dtype, x_dtype};
        return tape->device->ops->convert(tape->device, &convert);
    }
    dtrain_add_args args = {x->count, x->grad, from->grad, x->grad, x_dtype, from_dtype};
    return tape->device->ops->add(tape->device, &args);
}

/* ---- Parameters -------------------------------------------------------------------------------*/

/* Where value and gradient are: the end of the alias chain. A strategy has looked it up already. */
DTRAIN__PRIVATE dtrain_param *dtrain__param_storage(dtrain_param *p)
{
    if (p->state.storage) return p->state.storage;
    while (p->alias_of) p = p->alias_of;
    return p;
}

/* Whether p gets a gradient in this pass. A plan may be made before gradients are allocated: there
 * only the flag counts. */
DTRAIN__PRIVATE bool dtrain__param_trainable(const dtrain_tape *tape, dtrain_param *p)
{
    const dtrain_param *storage = dtrain__param_storage(p);
    if (tape->flags & DTRAIN_TAPE_NO_GRAD) return false;
    if ((p->flags | storage->flags) & DTRAIN_PARAM_FROZEN) return false;
    return tape->planning || tape->strategy || storage->grad;
}

/* Where node's backward writes the gradient of param[i], and whether it has to add; NULL when none
 * is wanted. Whoever asks must write: the gradient counts as written from here on. */
DTRAIN__PRIVATE float *dtrain__param_grad(const dtrain_tape *tape, const dtrain_node *node, int i,
                                          bool *accumulate)
{
    *accumulate = false;
    if (!node->param[i] || !dtrain__param_trainable(tape, node->param[i])) return NULL;
    dtrain_param *storage = dtrain__param_storage(node->param[i]);
    *accumulate = storage->state.grad_written;
    if (!tape->planning) storage->state.grad_written = true;
    return storage->grad;
}

/* ---- Life of a tape ---------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_tape_create(dtrain_world *world, dtrain_strategy *strategy,
                                            dtrain_device *device, dtrain_tape **out)
{
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_create: out is NULL");
    *out = NULL;
    if (!world && !device)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_create: world and device are both "
                                                  "NULL; a tape needs a device to run on");
    dtrain_allocator allocator =
        dtrain__resolve_allocator(world ? dtrain_world_allocator(world) : NULL);
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
