/* Backward
 *
 * 1. mark the nodes between the trainable leaves and the loss, and count the contributions to each
 *    parameter; an alias and its target count separately, as the strategy has registered them
 * 2. in reverse order: enter the node's unit, recompute dropped values, run the node's backward,
 *    give back the gradients of its outputs, tell the strategy about parameters that have had their
 *    last contribution
 *
 * In a zero-bubble pipeline step 2 leaves out gradients of parameters; another walk makes them
 * later (dtrain__backward_params).
 *
 * A node is recorded after the producers of its inputs. So when the walk reaches a node, all uses
 * of its outputs have contributed: their gradients are complete, and their buffers go back to the
 * pool after use. A handful of buffers serves a model of any depth. */

#include "core/platform_internal.h"
#include "world/timeline_internal.h"
#include "tape/tape_internal.h"

static dtrain_result dtrain__gradient_complete(dtrain_tape *tape, dtrain_tensor *x);

/* Give back the gradients of a node's outputs, and tell the strategy about parameters that have had
 * their last contribution. */
static dtrain_result dtrain__backward_done(dtrain_tape *tape, dtrain_node *node)
{
    const dtrain_op *op = &node->op;
    for (uint32_t i = 0; i < op->output_count; i++) {
        dtrain__tape_tensor *made = (dtrain__tape_tensor *)op->outputs[i];
        if (made->gradient) made->gradient->owners--;
        made->gradient = NULL;
        made->tensor.grad = NULL;
    }
    for (uint32_t i = 0; i < op->param_count; i++) {
        dtrain_param_state *state = &op->params[i]->state;
        if (--state->pending_uses || !tape->strategy || !node->target[i]) continue;
        if (tape->pass.more) dtrain__note_gradient(tape->strategy, state->index);
        else DTRAIN__TRY(dtrain_strategy_ready(tape->strategy, state->index));
    }
    return DTRAIN_OK;
}

/* Do both steps from the nodes that are marked as reached. */
static dtrain_result dtrain__backward_walk(dtrain_tape *tape)
{
    for (dtrain_node *node = tape->pass.last; node; node = node->previous) {
        const dtrain_op *op = &node->op;
        if (!node->reached) continue;
        for (uint32_t i = 0; i < op->input_count; i++)
            if (op->inputs[i]->needs_grad && op->inputs[i]->producer)
                op->inputs[i]->producer->reached = true;
        for (uint32_t i = 0; i < op->param_count; i++) op->params[i]->state.pending_uses++;
    }
    for (dtrain_node *node = tape->pass.last; node; node = node->previous) {
        dtrain_op *op = &node->op;
        if (!node->reached) continue;
        DTRAIN__TRY(dtrain__tape_enter(tape, node->unit));
        if (tape->pass.cast_mark != node->mark) /* round the weights of a unit gathered again */
            for (const dtrain__cast *cast = tape->casts; cast; cast = cast->next)
                if (cast->mark == node->mark)
                    DTRAIN__TRY(dtrain__tape_convert(tape->device, cast->count,
                                                     cast->storage->value, DTRAIN_DTYPE_F32,
                                                     cast->low, tape->pass.cast));
        tape->pass.cast_mark = node->mark;
        DTRAIN__TRY(dtrain__segment_again(tape, node));
        /* the loss can be independent of this output */
        DTRAIN__TRY(dtrain__gradient_zeros(tape, op->outputs[0]));
        /* leave gradients of parameters to the second half, unless values are dropped: they would
         * be gone by then */
        for (uint32_t i = 0; i < op->param_count; i++)
            if (tape->pass.halves && (op->reads & DTRAIN_OP_SPLITS) && !node->segment &&
                node->target[i])
                node->halved = true;
        op->half = node->halved ? DTRAIN_OP_HALF_INPUTS : DTRAIN_OP_HALF_BOTH;
        DTRAIN__TRY(dtrain__op_call(op, op->desc->backward));
        for (uint32_t i = 0; i < op->input_count; i++)
            DTRAIN__TRY(dtrain__gradient_complete(tape, op->inputs[i]));
        if (!node->halved) DTRAIN__TRY(dtrain__backward_done(tape, node));
    }
    return dtrain__tape_enter(tape, -1);
}

DTRAIN__PRIVATE dtrain_result dtrain__check_loss(const char *call, const dtrain_tensor *loss)
{
    if (loss->count == 1) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "%s: the loss has %lld elements, not one; use dtrain_mean or dtrain_sum",
                       call, (long long)loss->count);
}

/* Set the gradient of the loss to `scale` times its weight. A recorded pass computes the weight on
 * the device, from the number of samples there. */
static dtrain_result dtrain__backward_seed(dtrain_tape *tape, dtrain_tensor *loss, float scale)
{
    const char *const call = "dtrain_tape_backward";
    const dtrain__samples *samples = &((const dtrain__tape_tensor *)loss)->samples;
    dtrain_strategy *strategy = tape->strategy;
    dtrain_axpby_args seed;
    int64_t full = 0;
    bool accumulate;
    DTRAIN__TRY(dtrain__check_loss(call, loss));
    if (!loss->needs_grad)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "%s: the loss depends on no trainable parameter and no input with "
                           "requires_grad, or the pass was begun with DTRAIN_TAPE_NO_GRAD",
                           call);
    DTRAIN__TRY(dtrain__tensor_keep(tape, loss, call));
    if (loss->producer) loss->producer->reached = true;
    if (strategy) {
        DTRAIN__TRY(dtrain__end_sums(strategy, tape->pass.sums, false));
        DTRAIN__TRY(dtrain__agree_full_batch(strategy, samples->terms));
    }
    DTRAIN__TRY(dtrain__gradient_open(tape, loss, &accumulate));
    if (strategy) full = dtrain__weigh_loss(strategy, samples);
    const double each = full ? (double)scale / (double)full : 0;
    if (full && samples->device_valid)
        return dtrain__sum_to(tape->device, loss->grad, samples->device_valid + 1, DTRAIN_DTYPE_F32,
                              1, each, NULL);
    memset(&seed, 0, sizeof seed); /* x NULL: the constant 1 */
    seed.count = 1;
    seed.a = full ? (float)(each * dtrain__samples_count(samples)) : scale;
    seed.y = loss->grad;
    seed.dtype = DTRAIN_DTYPE_F32;
    return tape->device->ops->axpby(tape->device, &seed);
}

DTRAIN__PRIVATE dtrain_result dtrain__backward_pass(dtrain_tape *tape, dtrain_tensor *loss,
                                                    float scale)
{
    DTRAIN__TRY(dtrain__tape_check(tape, "dtrain_tape_backward"));
    tape->pass.state = DTRAIN__TAPE_DONE;
    tape->pass.segment = NULL;
    if (loss) DTRAIN__TRY(dtrain__backward_seed(tape, loss, scale));
    return dtrain__backward_walk(tape);
}

DTRAIN_API dtrain_result dtrain_tape_backward(dtrain_tape *tape, dtrain_tensor *loss, float scale)
{
    DTRAIN__TRY(dtrain__tape_check(tape, "dtrain_tape_backward"));
    if (!loss)
        return dtrain__tape_stick(
            tape, dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_tape_backward: loss is NULL"));
    const uint32_t span =
        dtrain__span_begin(tape->world, DTRAIN_SPAN_BACKWARD, "backward", DTRAIN__UNNUMBERED);
    const dtrain_result result = dtrain__backward_pass(tape, loss, scale);
    dtrain__span_end(tape->world, span);
    return dtrain__tape_stick(tape, result);
}

/* Walk the nodes that have a second half, in the same order: a parameter of several nodes gets its
 * contributions in the order of a whole backward. */
DTRAIN__PRIVATE dtrain_result dtrain__backward_params(dtrain_tape *tape)
{
    dtrain_result result = tape->error;
    for (dtrain_node *node = tape->pass.last; node; node = node->previous)
        for (uint32_t i = 0; i < node->op.param_count && node->halved; i++)
            node->op.params[i]->state.pending_uses = 0;
    for (dtrain_node *node = tape->pass.last; node; node = node->previous)
        for (uint32_t i = 0; i < node->op.param_count && node->halved; i++)
            node->op.params[i]->state.pending_uses++;
    for (dtrain_node *node = tape->pass.last; node && result == DTRAIN_OK; node = node->previous) {
        if (!node->halved) continue;
        node->op.half = DTRAIN_OP_HALF_PARAMS;
        result = dtrain__op_call(&node->op, node->op.desc->backward);
        if (result == DTRAIN_OK) result = dtrain__backward_done(tape, node);
        node->halved = false;
    }
    return dtrain__tape_stick(tape, result);
}

/* ---- Gradients of tensors
 *
 * The first contribution overwrites, later ones add. An operation that only passes its gradient on
 * (add) shares the buffer instead of copying it; a writer copies a shared buffer first. In a
 * residual network
 *
 *     y = add(x, f(x)):   d y becomes d x and d f(x) at no cost; f's backward reads it and gives it
 *                         back, so d x is the only owner when f's backward adds to it
 *
 * A kernel that can only overwrite gets a private buffer; earlier contributions are put aside
 * (`earlier`) and added after its backward, or when it asks for the same tensor again. */

/* Point x's gradient to a chunk; the caller counts the owners. */
static void dtrain__gradient_set(dtrain_tensor *x, dtrain__chunk *chunk)
{
    ((dtrain__tape_tensor *)x)->gradient = chunk;
    x->grad = chunk ? chunk->memory : NULL;
}

/* Make x the only owner of its gradient, for one contribution; *accumulate tells the kernel whether
 * to add. A gradient without a chunk is not shared. */
DTRAIN__PRIVATE dtrain_result dtrain__gradient_open(dtrain_tape *tape, dtrain_tensor *x,
                                                    bool *accumulate)
{
    dtrain__chunk *shared = ((dtrain__tape_tensor *)x)->gradient, *chunk;
    *accumulate = x->grad != NULL;
    if (x->grad && (!shared || shared->owners == 1)) return DTRAIN_OK;
    chunk = dtrain__scratch_take(tape, x->count, x->dtype);
    if (!chunk) return tape->error;
    dtrain__gradient_set(x, chunk);
    if (!shared) return DTRAIN_OK;
    shared->owners--;
    return tape->device->ops->copy(tape->device, chunk->memory, shared->memory,
                                   dtrain__tensor_bytes(x), DTRAIN_COPY_DEVICE_TO_DEVICE);
}

DTRAIN__PRIVATE dtrain_result dtrain__gradient_zeros(dtrain_tape *tape, dtrain_tensor *x)
{
    bool accumulate;
    if (x->grad) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__gradient_open(tape, x, &accumulate));
    return tape->device->ops->zero(tape->device, x->grad, dtrain__tensor_bytes(x));
}

/* Add the contributions that were put aside to x's gradient. */
static dtrain_result dtrain__gradient_complete(dtrain_tape *tape, dtrain_tensor *x)
{
    dtrain__tape_tensor *made = (dtrain__tape_tensor *)x;
    dtrain__chunk *earlier = made->earlier;
    if (!earlier) return DTRAIN_OK;
    made->earlier = NULL;
    earlier->owners--;
    return dtrain__tape_add(tape->device, x->count, x->grad, x->dtype, earlier->memory, x->dtype,
                            x->grad);
}

/* Add an output's gradient to an input's. If the input has no gradient yet and the same type, they
 * share the buffer. Memory of a value (no chunk) is copied: activation checkpointing can overwrite
 * it while the input still needs its gradient. */
DTRAIN__PRIVATE dtrain_result dtrain__gradient_pass(dtrain_op *op, uint32_t output, uint32_t input)
{
    const dtrain_tensor *from = op->outputs[output];
    dtrain_tensor *x = op->inputs[input];
    dtrain__chunk *chunk = ((const dtrain__tape_tensor *)from)->gradient;
    bool accumulate;
    if (!x->needs_grad) return DTRAIN_OK;
    if (!x->grad && from->dtype == x->dtype && chunk) {
        chunk->owners++;
        dtrain__gradient_set(x, chunk);
        return DTRAIN_OK;
    }
    DTRAIN__TRY(dtrain__gradient_open(op->tape, x, &accumulate));
    if (accumulate)
        return dtrain__tape_add(op->device, x->count, x->grad, x->dtype, from->grad, from->dtype,
                                x->grad);
    return dtrain__tape_convert(op->device, x->count, from->grad, from->dtype, x->grad, x->dtype);
}

/* ---- For authors of operations ----------------------------------------------------------------*/

DTRAIN_API void *dtrain_op_input_grad(dtrain_op *op, uint32_t i, bool *accumulate)
{
    bool add = false;
    if (accumulate) *accumulate = false;
    if (op->tape->error != DTRAIN_OK || i >= op->input_count || !op->inputs[i]->needs_grad ||
        op->half == DTRAIN_OP_HALF_PARAMS)
        return NULL;
    dtrain__tape_tensor *made = (dtrain__tape_tensor *)op->inputs[i];
    dtrain__tape_stick(op->tape, dtrain__gradient_complete(op->tape, &made->tensor));
    if (!accumulate) {
        made->earlier = made->gradient;
        dtrain__gradient_set(&made->tensor, NULL);
    }
    dtrain__tape_stick(op->tape, dtrain__gradient_open(op->tape, &made->tensor, &add));
    if (accumulate) *accumulate = add;
    return made->tensor.grad;
}

/* The caller must write the gradient: it counts as written from now on. */
DTRAIN_API float *dtrain_op_param_grad(dtrain_op *op, uint32_t i, bool *accumulate)
{
    dtrain_param *target = i < op->param_count ? ((dtrain_node *)op)->target[i] : NULL;
    const bool first = i < op->param_count && (op->reads & DTRAIN__OP_FIRST_HALF(i));
    *accumulate = false;
    if (!target || op->half == (uint32_t)(first ? DTRAIN_OP_HALF_PARAMS : DTRAIN_OP_HALF_INPUTS))
        return NULL;
    *accumulate = !op->planning && target->state.grad_written;
    float *grad = op->planning ? (float *)DTRAIN__REMOTE : target->grad;
    /* Sequence parallelism sums the gradients of whole parameters over the ranks. In an operation
     * on whole tensors each rank has the full gradient, so only the first rank counts it: the
     * others write to scratch memory, and their gradient keeps its value or zero. */
    const dtrain__groups *groups = &op->tape->groups;
    if (groups->sequence_parallel && groups->tensor_rank && !target->cut.axis &&
        op->outputs[0]->placement == DTRAIN_PLACEMENT_WHOLE) {
        const int64_t count = dtrain__share_here(target, groups).count;
        if (!*accumulate)
            dtrain__tape_stick(
                op->tape, op->device->ops->zero(op->device, grad, (size_t)count * sizeof(float)));
        *accumulate = false;
        grad = (float *)dtrain__take_data(op->tape, NULL, count, DTRAIN_DTYPE_F32);
    }
    if (!op->planning) dtrain__set_grad_written(target, true); /* a plan leaves no trace */
    return grad;
}
