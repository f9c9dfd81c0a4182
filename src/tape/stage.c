/* Stages: a part of a model, several passes at once
 *
 * Each rank runs the whole function of the model. In the pass of a stage, operations of other
 * stages are only prepared, which keeps the shapes, placements and dropout streams of the whole
 * model:
 *
 *     unit           0        1        2        3
 *     stage          0        0        1        1
 *     rank 0      computes computes  remote   remote        x crosses: rank 0 sends it after the
 *     rank 1      remote   remote  computes computes        pass, rank 1 finds it in place of its
 *                            x ------>                      remote tensor
 *
 * Inputs do not cross: all ranks of a pipeline have the batch, and a rank uploads the inputs of its
 * stages. The first pass of a micro-batch on a rank uploads them; its later passes share them. */

#include "core/platform_internal.h"
#include "tape/stage_internal.h"
#include "tape/tape_internal.h"

/* ---- Slots ------------------------------------------------------------------------------------*/

static void dtrain__slot_select(dtrain_tape *tape, dtrain__pass_slot *slot)
{
    tape->slot->pass = tape->pass;
    tape->pass = slot->pass;
    tape->slot = slot;
}

DTRAIN__PRIVATE dtrain_result dtrain__stages_create(dtrain_tape *tape, const dtrain__stage_map *map,
                                                    uint32_t slot_count, uint32_t inbox_count)
{
    const dtrain_allocator *a = &tape->allocator;
    dtrain__stages *stages = (dtrain__stages *)dtrain__alloc(a, 1, sizeof *stages, "stages");
    if (!stages) return DTRAIN_ERROR_MEMORY;
    dtrain__slots_free(tape); /* other ranks must reach the new memory */
    tape->stages = stages;
    stages->map = map;
    DTRAIN__TRY(dtrain__slots_create(tape, slot_count));
    dtrain__arena_add(tape, &stages->zeros, tape->device);
    dtrain__arena_add(tape, &stages->lists, NULL);
    stages->inboxes =
        (dtrain__inbox *)dtrain__alloc(a, inbox_count, sizeof *stages->inboxes, "inboxes");
    if (!stages->inboxes) return DTRAIN_ERROR_MEMORY;
    stages->inbox_count = inbox_count;
    for (uint32_t i = 0; i < inbox_count; i++)
        dtrain__arena_add(tape, &stages->inboxes[i].arena, tape->device);
    return DTRAIN_OK;
}

/* ---- Remote operations: functions for the tape ------------------------------------------------*/

DTRAIN__PRIVATE bool dtrain__is_surveying(const dtrain_tape *tape)
{
    return tape->stages && tape->slot->stage == DTRAIN__SURVEY;
}

DTRAIN__PRIVATE bool dtrain__stage_is_remote(const dtrain_tape *tape)
{
    return tape->stages && tape->stages->at != tape->slot->stage;
}

DTRAIN__PRIVATE void dtrain__stage_made(dtrain_tape *tape, dtrain__tape_tensor *made,
                                        const dtrain_node *node)
{
    const dtrain__stages *stages = tape->stages;
    dtrain__pass_slot *slot = tape->slot;
    dtrain_tensor *x = &made->tensor;
    made->stage = made->last_stage = node ? stages->at : -1;
    made->remote = x->data == (void *)DTRAIN__REMOTE;
    if (slot->stage == DTRAIN__SURVEY || !node) {
        made->next = slot->listed;
        slot->listed = made;
        return;
    }
    if (slot->next_crossing == stages->crossing_count) return;
    const dtrain__crossing *crossing = &stages->crossings[slot->next_crossing];
    if (crossing->number != tape->pass.tensor_count) return;
    const size_t k = slot->next_crossing++;
    if (crossing->stage != made->stage || crossing->count != x->count ||
        crossing->dtype != x->dtype) {
        dtrain__tape_stick(
            tape,
            dtrain_fail(DTRAIN_ERROR_USAGE,
                        "tensor %zu of the loss, which crosses stages, has %lld elements of %s and "
                        "is made in stage %d; in the first micro-batch it had %lld of %s, in stage "
                        "%d; which operations the loss calls must not depend on values, and all "
                        "micro-batches of a step over a pipeline have the same shapes",
                        crossing->number, (long long)x->count,
                        dtrain_dtype_name((dtrain_dtype)x->dtype), (int)made->stage,
                        (long long)crossing->count,
                        dtrain_dtype_name((dtrain_dtype)crossing->dtype), (int)crossing->stage));
        return;
    }
    slot->crossed[k].tensor = made;
    if (crossing->stage >= slot->stage || crossing->last_stage < slot->stage) return;
    made->remote = false;
    x->data = slot->received[k];
}

DTRAIN__PRIVATE dtrain_result dtrain__stage_input(dtrain_tape *tape, dtrain__tape_tensor *made,
                                                  bool *shared)
{
    const dtrain__stages *stages = tape->stages;
    dtrain__pass_slot *slot = tape->slot;
    dtrain_tensor *x = &made->tensor;
    *shared = false;
    if (!stages) return DTRAIN_OK;
    const size_t number = slot->input_count++;
    if (x->needs_grad)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_tape_input: a pipeline has no gradients of inputs; leave "
                           "requires_grad false");
    if (slot->batch == slot) {
        made->remote =
            dtrain__is_surveying(tape) || number >= stages->input_count || !stages->reads[number];
        return DTRAIN_OK;
    }
    const dtrain__tape_tensor *before = slot->batch->listed; /* in the micro-batch's first pass */
    for (size_t i = slot->batch->input_count; before && i > number + 1; i--) before = before->next;
    if (!before) return DTRAIN_OK;
    if (before->tensor.count != x->count || before->tensor.dtype != x->dtype)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_tape_input: input %zu has %lld elements, and %lld in this "
                           "micro-batch's first pass on this rank; every pass of a pipeline makes "
                           "the same inputs",
                           number + 1, (long long)x->count, (long long)before->tensor.count);
    x->data = before->tensor.data;
    made->remote = before->remote;
    made->samples = before->samples;
    *shared = true;
    return DTRAIN_OK;
}

/* ---- The survey -------------------------------------------------------------------------------*/

/* List crossing tensors and inputs after the model has run with all stages remote. */
static dtrain_result dtrain__survey_end(dtrain_tape *tape)
{
    dtrain__stages *stages = tape->stages;
    const dtrain__tape_tensor *made = tape->slot->listed;
    size_t count = 0, inputs = 0, number = tape->pass.tensor_count;
    for (const dtrain__tape_tensor *x = made; x; x = x->next) {
        inputs += x->stage < 0;
        count += x->last_stage > x->stage;
    }
    stages->crossing_count = stages->input_count = 0;
    dtrain__bump_rewind(&stages->lists);
    stages->crossings = (dtrain__crossing *)dtrain__take_host(tape, &stages->lists,
                                                              count * sizeof *stages->crossings);
    stages->reads = (bool *)dtrain__take_host(tape, &stages->lists, inputs * sizeof(bool));
    for (uint32_t s = 0; s < tape->slot_count; s++)
        tape->slots[s].crossed = (dtrain__crossed *)dtrain__take_host(
            tape, &stages->lists, count * sizeof(dtrain__crossed));
    for (uint32_t i = 0; i < stages->inbox_count; i++)
        stages->inboxes[i].received =
            (void **)dtrain__take_host(tape, &stages->lists, count * sizeof(void *));
    DTRAIN__TRY(tape->error);
    stages->crossing_count = count;
    stages->input_count = inputs;
    for (const dtrain__tape_tensor *x = made; x; x = x->next, number--) {
        if (x->stage < 0) stages->reads[--inputs] = x->read_here;
        if (x->last_stage <= x->stage) continue;
        dtrain__crossing *crossing = &stages->crossings[--count];
        crossing->number = number;
        crossing->stage = x->stage;
        crossing->last_stage = x->last_stage;
        crossing->count = x->tensor.count;
        crossing->dtype = x->tensor.dtype;
        crossing->grad = x->tensor.needs_grad;
    }
    return DTRAIN_OK;
}

/* ---- Passes -----------------------------------------------------------------------------------*/

DTRAIN__PRIVATE void dtrain__stage_reset(dtrain_tape *tape)
{
    const size_t count = tape->stages->crossing_count;
    dtrain__tape_reset(tape);
    for (uint32_t s = 0; count && s < tape->slot_count; s++)
        memset(tape->slots[s].crossed, 0, count * sizeof(dtrain__crossed));
}

/* Find item i of a message between `stage` and the next stage: the number of its crossing; false:
 * there is no item i. `gradient`: the message goes back. */
static bool dtrain__stage_item(const dtrain_tape *tape, int32_t stage, bool gradient, size_t i,
                               size_t *crossing)
{
    const dtrain__stages *stages = tape->stages;
    for (size_t k = 0; k < stages->crossing_count; k++) {
        const dtrain__crossing *c = &stages->crossings[k];
        if (c->stage > stage || c->last_stage <= stage || (gradient && !c->grad)) continue;
        *crossing = k;
        if (i-- == 0) return true;
    }
    return false;
}

DTRAIN__PRIVATE dtrain_result dtrain__stage_begin(dtrain_tape *tape, uint32_t number,
                                                  uint32_t batch, int32_t stage, int32_t inbox,
                                                  uint32_t flags, uint64_t seed)
{
    dtrain__stages *stages = tape->stages;
    dtrain__pass_slot *slot = &tape->slots[number];
    dtrain__slot_select(tape, slot);
    for (size_t k = 0; k < stages->crossing_count; k++) {
        dtrain__crossed *crossed = &slot->crossed[k];
        if (crossed->tensor && crossed->tensor->gradient) crossed->sent = crossed->tensor->gradient;
        crossed->tensor = NULL; /* the gradient of the last pass is perhaps still being sent */
    }
    slot->stage = stage;
    slot->batch = &tape->slots[batch];
    slot->received = inbox >= 0 ? stages->inboxes[inbox].received : NULL;
    slot->listed = NULL;
    slot->next_crossing = slot->input_count = 0;
    stages->at = 0;
    return dtrain__pass_begin(tape, flags, seed);
}

DTRAIN__PRIVATE dtrain_result dtrain__stage_end(dtrain_tape *tape)
{
    const dtrain__stages *stages = tape->stages;
    const dtrain__pass_slot *slot = tape->slot;
    DTRAIN__TRY(tape->error);
    if (slot->stage == DTRAIN__SURVEY) return dtrain__survey_end(tape);
    if (slot->next_crossing == stages->crossing_count && stages->at == stages->map->stages - 1)
        return DTRAIN_OK;
    return dtrain__tape_stick(
        tape, dtrain_fail(DTRAIN_ERROR_USAGE,
                          "the loss made %zu of the %zu tensors that cross stages, and came to "
                          "stage %d of %d: which operations it calls must not depend on values",
                          slot->next_crossing, stages->crossing_count, (int)stages->at,
                          (int)stages->map->stages));
}

DTRAIN__PRIVATE dtrain_result dtrain__stage_backward(dtrain_tape *tape, uint32_t number,
                                                     dtrain_tensor *loss, float scale, bool more,
                                                     bool halves)
{
    dtrain__pass_slot *slot = &tape->slots[number];
    dtrain__slot_select(tape, slot);
    tape->pass.more = more;
    tape->pass.halves = halves;
    for (size_t i = 0, k; dtrain__stage_item(tape, slot->stage, true, i, &k); i++) {
        dtrain__tape_tensor *x = slot->crossed[k].tensor;
        if (x->tensor.producer) x->tensor.producer->reached = true;
        if (x->tensor.needs_grad || !x->gradient) continue;
        dtrain__scratch_give(x->gradient); /* received for parameters frozen in this step */
        x->gradient = NULL;
        x->tensor.grad = NULL;
    }
    dtrain_result result = dtrain__backward_pass(tape, loss, scale);
    /* zero the gradients to send that have no contribution */
    for (size_t i = 0, k; !result && dtrain__stage_item(tape, slot->stage - 1, true, i, &k); i++)
        result = dtrain__gradient_zeros(tape, &slot->crossed[k].tensor->tensor);
    return dtrain__tape_stick(tape, result);
}

DTRAIN__PRIVATE dtrain_result dtrain__stage_weights(dtrain_tape *tape, uint32_t number)
{
    dtrain__slot_select(tape, &tape->slots[number]);
    return dtrain__backward_params(tape);
}

DTRAIN__PRIVATE dtrain_result dtrain__stage_part(dtrain_tape *tape, int32_t stage,
                                                 const dtrain_pipeline_action *action, bool empty,
                                                 size_t i, dtrain_pipeline_part *part)
{
    dtrain__stages *stages = tape->stages;
    const bool receives = action->act == DTRAIN_PIPELINE_ACT_RECEIVE;
    const bool gives_back = action->act == DTRAIN_PIPELINE_ACT_SEND_GRADIENT;
    const bool seeds = action->act == DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT;
    const int32_t before = receives || gives_back ? stage - 1 : stage;
    dtrain__bump *zeros = &stages->zeros;
    dtrain__crossed *crossed = receives ? NULL : tape->slots[action->slot].crossed;
    bool accumulate;
    size_t k;
    if (empty && (gives_back || seeds)) return DTRAIN_OK;
    if (receives && i == 0) {
        dtrain__inbox *inbox = &stages->inboxes[action->inbox];
        dtrain__bump_rewind(&inbox->arena);
        for (size_t n = 0; dtrain__stage_item(tape, before, false, n, &k); n++) {
            const dtrain__crossing *c = &stages->crossings[k];
            inbox->received[k] = dtrain__take_values(tape, &inbox->arena, c->count, c->dtype);
            if (!inbox->received[k]) return tape->error;
        }
    }
    for (k = 0; gives_back && i == 0 && k < stages->crossing_count; k++) {
        dtrain__scratch_give(crossed[k].sent);
        crossed[k].sent = NULL;
    }
    for (size_t n = 0; seeds && i == 0 && dtrain__stage_item(tape, stage, true, n, &k); n++)
        DTRAIN__TRY(dtrain__gradient_open(tape, &crossed[k].tensor->tensor, &accumulate));
    if (!dtrain__stage_item(tape, before, gives_back || seeds, i, &k)) return DTRAIN_OK;
    const dtrain__crossing *c = &stages->crossings[k];
    if (receives) {
        part->address = stages->inboxes[action->inbox].received[k];
    } else if (empty) {
        const uint64_t bytes = zeros->bytes;
        dtrain__bump_rewind(zeros);
        part->address = dtrain__take_values(tape, zeros, c->count, c->dtype);
        if (part->address && zeros->bytes > bytes)
            dtrain__tape_stick(tape, tape->device->ops->zero(tape->device, part->address,
                                                             (size_t)(zeros->bytes - bytes)));
    } else {
        const dtrain__tape_tensor *x = crossed[k].tensor;
        part->address = !x ? NULL : gives_back || seeds ? x->tensor.grad : x->tensor.data;
    }
    if (!part->address) return tape->error;
    part->count = (size_t)c->count;
    part->dtype = (dtrain_dtype)c->dtype;
    return DTRAIN_OK;
}
