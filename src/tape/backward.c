/* Backward
 *
 * 1. mark the nodes between the trainable leaves and the loss, and count how often each parameter
 *    will get a contribution; alias and target are counted apart, as the strategy registered them
 * 2. in reverse order: enter the node's unit, make its values again if they were dropped, run its
 *    backward, give its outputs' gradients back, tell the strategy about parameters that have had
 *    their last contribution
 *
 * Nodes are recorded after the nodes that made their inputs, so when the walk reaches a node every
 * use of its outputs has contributed: their gradients are complete, are spent, and their buffers go
 * back. A handful of buffers serves a model of any depth. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "strategy/params.h"
#include "strategy/strategy.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "device/backend.h"
#include "device/device.h"

static void dtrain__mark_reached(dtrain_tape *tape, dtrain_tensor *loss)
{
    dtrain_node *node;
    if (loss->producer) loss->producer->reached = true;
    for (node = tape->last; node; node = node->previous) {
        const dtrain_op *op = &node->op;
        if (!node->reached) continue;
        for (uint32_t i = 0; i < op->input_count; i++)
            if (op->inputs[i]->needs_grad && op->inputs[i]->producer)
                op->inputs[i]->producer->reached = true;
        /* a backward that failed half-way leaves a count behind */
        for (uint32_t i = 0; i < op->param_count && !tape->planning; i++)
            op->params[i]->state.pending_uses = 0;
    }
    for (node = tape->last; node && !tape->planning; node = node->previous)
        for (uint32_t i = 0; i < node->op.param_count && node->reached; i++)
            node->op.params[i]->state.pending_uses++;
}

/* No contribution came to the first output: another output did, or nothing depends on it. */
static dtrain_result dtrain__gradient_zero(dtrain_tape *tape, dtrain_tensor *x)
{
    bool accumulate;
    DTRAIN__TRY(dtrain__gradient_open(tape, x, &accumulate));
    return tape->device->ops->zero(tape->device, x->grad, dtrain__tensor_bytes(x));
}

static dtrain_result dtrain__backward_node(dtrain_tape *tape, dtrain_node *node)
{
    dtrain_op *op = &node->op;
    DTRAIN__TRY(dtrain__tape_enter(tape, node->unit));
    DTRAIN__TRY(dtrain__segment_again(tape, node));
    if (!op->outputs[0]->grad) DTRAIN__TRY(dtrain__gradient_zero(tape, op->outputs[0]));
    DTRAIN__TRY(op->desc->backward(op));
    DTRAIN__TRY(tape->error);
    for (uint32_t i = 0; i < op->output_count; i++) dtrain__gradient_drop(op->outputs[i]);
    for (uint32_t i = 0; i < op->param_count && !tape->planning; i++) {
        dtrain_param *p = op->params[i];
        if (--p->state.pending_uses == 0 && tape->strategy && dtrain__param_trainable(node, i))
            DTRAIN__TRY(dtrain_strategy_ready(tape->strategy, p->state.index));
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__backward_run(dtrain_tape *tape, dtrain_tensor *loss, float scale)
{
    bool accumulate;
    dtrain_axpby_args seed;
    tape->segment = NULL;
    DTRAIN__TRY(dtrain__tensor_keep(tape, loss, "dtrain_tape_backward"));
    dtrain__mark_reached(tape, loss);
    DTRAIN__TRY(dtrain__gradient_open(tape, loss, &accumulate));
    memset(&seed, 0, sizeof seed);
    seed.count = 1;
    seed.a = scale;
    seed.y = loss->grad;
    seed.dtype = DTRAIN_DTYPE_F32;
    DTRAIN__TRY(tape->device->ops->axpby(tape->device, &seed));
    for (dtrain_node *node = tape->last; node; node = node->previous)
        if (node->reached) DTRAIN__TRY(dtrain__backward_node(tape, node));
    return dtrain__tape_enter(tape, -1);
}

DTRAIN_API dtrain_result dtrain_tape_backward(dtrain_tape *tape, dtrain_tensor *loss, float scale)
{
    const char *const call = "dtrain_tape_backward";
    dtrain_result result = dtrain__tape_check(tape, call);
    if (result != DTRAIN_OK) return tape ? dtrain_tape_error(tape) : result;
    if (tape->flags & DTRAIN_TAPE_NO_GRAD)
        result = dtrain_fail(DTRAIN_ERROR_USAGE, "%s: the pass was begun with DTRAIN_TAPE_NO_GRAD",
                             call);
    else if (!loss) result = dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: loss is NULL", call);
    else if (loss->count != 1)
        result = dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                             "%s: the loss has %lld elements, not one; use dtrain_mean or "
                             "dtrain_sum",
                             call, (long long)loss->count);
    else if (!loss->needs_grad)
        result = dtrain_fail(DTRAIN_ERROR_USAGE,
                             "%s: the loss depends on no trainable parameter "
                             "and no input with requires_grad",
                             call);
    else result = dtrain__backward_run(tape, loss, scale);
    tape->state = DTRAIN__TAPE_DONE;
    return dtrain__tape_stick(tape, result);
}

/* ---- Gradients of tensors
 *
 * The first contribution overwrites, later ones add. An operation that only hands its gradient on
 * (add) makes the buffer shared instead of copying it; who wants to write into a shared buffer
 * makes a copy first. In a residual network
 *
 *     y = add(x, f(x)):   d y becomes d x and d f(x) at no cost; f's backward reads it and lets go,
 *                         and by the time it adds its own share to d x that is the only owner */

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

/* x's gradient += what is at `more`, of type dtype. */
static dtrain_result dtrain__gradient_add(dtrain_tape *tape, dtrain_tensor *x, const void *more,
                                          uint32_t dtype)
{
    dtrain_add_args args;
    memset(&args, 0, sizeof args);
    args.count = x->count;
    args.x = x->grad;
    args.y = more;
    args.out = x->grad;
    args.x_dtype = (dtrain_dtype)x->dtype;
    args.y_dtype = (dtrain_dtype)dtype;
    return tape->device->ops->add(tape->device, &args);
}

DTRAIN__PRIVATE dtrain_result dtrain__gradient_merge(dtrain_tape *tape, dtrain_tensor *x,
                                                     dtrain__chunk *earlier)
{
    if (!earlier) return DTRAIN_OK;
    earlier->owners--;
    return dtrain__gradient_add(tape, x, earlier->memory, x->dtype);
}

/* x's gradient += from's gradient, by sharing the buffer when x has none yet and the same type. */
DTRAIN__PRIVATE dtrain_result dtrain__gradient_pass(dtrain_op *op, const dtrain_tensor *from,
                                                    dtrain_tensor *x)
{
    dtrain__chunk *chunk = ((const dtrain__tape_tensor *)from)->gradient;
    bool accumulate;
    if (!x->needs_grad) return DTRAIN_OK;
    if (!x->grad_written && from->dtype == x->dtype && !chunk->in_region) {
        chunk->owners++;
        dtrain__gradient_set(x, chunk);
        return DTRAIN_OK;
    }
    DTRAIN__TRY(dtrain__gradient_open(op->tape, x, &accumulate));
    if (accumulate) return dtrain__gradient_add(op->tape, x, from->grad, from->dtype);
    if (from->dtype == x->dtype)
        return op->device->ops->copy(op->device, x->grad, from->grad, dtrain__tensor_bytes(x),
                                     DTRAIN_COPY_DEVICE_TO_DEVICE);
    return dtrain__tape_convert(op->device, x->count, from->grad, from->dtype, x->grad, x->dtype);
}
