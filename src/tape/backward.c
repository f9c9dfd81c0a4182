/* Reading. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "strategy/params.h"
#include "strategy/strategy.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "device/backend.h"

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

/* ---- Backward
 *
 * 1. mark the nodes between the trainable leaves and the loss, and count how often each parameter
 *    will get a contribution; alias and target are counted apart, as the strategy registered them
 * 2. in reverse order: enter the node's unit, make its values again if they were dropped, run its
 *    backward, give its output's gradient back, tell the strategy about parameters that have had
 *    their last contribution */

static void dtrain__mark_reached(dtrain_tape *tape, dtrain_tensor *loss)
{
    dtrain_node *node;
    if (loss->producer) loss->producer->reached = true;
    for (node = tape->last; node; node = node->previous) {
        if (!node->reached) continue;
        for (int i = 0; i < 2; i++) {
            dtrain_tensor *x = node->in[i];
            if (x && x->needs_grad && x->producer) x->producer->reached = true;
            /* a backward that failed half-way leaves a count behind */
            if (node->param[i] && !tape->planning) node->param[i]->state.pending_uses = 0;
        }
    }
    if (tape->planning) return;
    for (node = tape->last; node; node = node->previous)
        for (int i = 0; i < 2; i++)
            if (node->reached && node->param[i]) node->param[i]->state.pending_uses++;
}

static dtrain_result dtrain__backward_node(dtrain_tape *tape, dtrain_node *node)
{
    DTRAIN__TRY(dtrain__tape_enter(tape, node->unit));
    DTRAIN__TRY(dtrain__segment_again(tape, node));
    DTRAIN__TRY(node->backward(tape, node));
    dtrain__gradient_drop(node->out);
    for (int i = 0; i < 2 && !tape->planning; i++) {
        dtrain_param *p = node->param[i];
        if (!p || --p->state.pending_uses > 0 || !tape->strategy ||
            !dtrain__param_trainable(tape, p))
            continue;
        DTRAIN__TRY(dtrain_strategy_ready(tape->strategy, p->state.index));
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__backward_run(dtrain_tape *tape, dtrain_tensor *loss, float scale)
{
    bool accumulate;
    tape->segment = NULL;
    DTRAIN__TRY(dtrain__tensor_keep(tape, loss, "dtrain_tape_backward"));
    dtrain__mark_reached(tape, loss);
    DTRAIN__TRY(dtrain__gradient_open(tape, loss, &accumulate));
    dtrain_axpby_args seed = {1, false, scale, 0, NULL, loss->grad, false, DTRAIN_DTYPE_F32};
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
